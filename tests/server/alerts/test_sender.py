"""Alerts reach a URL and a command; what fails is logged without what may be secret."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import SettingsError
from headwater.server.alerts import sender
from headwater.server.alerts.sender import Alert, Sender

ALERT = Alert(text="pi is away", kind="device-lost", subject="pi", is_over=False, run="r", at="t")


class Inbox:
    """An HTTP server that keeps what is posted; the first ``num_failing`` get status 500."""

    def __init__(self, num_failing: int = 0) -> None:
        self.found: list[dict[str, Any]] = []
        inbox = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                inbox.found.append(json.loads(data))
                self.send_response(500 if len(inbox.found) <= num_failing else 200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/a?token=secret"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "PAUSES", (0.01, 0.01))


@pytest.fixture
def failing() -> Iterator[Inbox]:
    inbox = Inbox(num_failing=1)
    yield inbox
    inbox.close()


def test_an_alert_is_posted_and_repeated_until_it_is_taken(quick: None, failing: Inbox) -> None:
    found = Sender(failing.url)
    found.send(ALERT)
    found.send_end()
    found._thread.join(10)
    expected = {"text": "pi is away", "kind": "device-lost", "subject": "pi", "is_over": False}
    assert failing.found == [{**expected, "run": "r", "at": "t"}] * 2
    assert not found.num_failures


def test_what_cannot_be_sent_is_counted_and_logged_without_the_url_s_secret(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    found = Sender("http://127.0.0.1:1/a?token=secret")
    found.send(ALERT)
    found.close()
    assert found.num_failures == 1
    (line,) = caplog.messages
    assert line.startswith("http://127.0.0.1: the alert 'pi is away' could not be sent:")
    assert "secret" not in line


def test_a_command_gets_the_alert_on_its_standard_input(tmp_path: Path) -> None:
    file = tmp_path / "alerts"
    code = f"import sys; open({str(file)!r}, 'a').write(sys.stdin.read())"
    found = Sender(f'{sys.executable} -c "{code}"')
    found.send(ALERT)
    found.close()
    assert json.loads(file.read_text())["text"] == "pi is away"


def test_a_command_that_fails_is_named_with_its_last_line(
    quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    found = Sender(f"{sys.executable} -c \"raise SystemExit('no mail here')\"")
    found.send(ALERT)
    found.close()
    assert "status 1: no mail here" in caplog.text


def test_a_variable_s_name_stands_for_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "https://example.org/x?token=secret")
    found = Sender("$WHERE")
    assert found.shown == "https://example.org"
    found.close()


@pytest.mark.parametrize("target", ["$NO_SUCH_VARIABLE", "", '"half', "/no/such/command now"])
def test_a_target_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(SettingsError):
        Sender(target)
