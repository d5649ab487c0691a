"""The page's web application: what it answers, to whom, and that nothing in it changes a run."""

from __future__ import annotations

import asyncio
import json
import ssl
import tempfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.common.errors import InsecureAddress, SettingsError
from headwater.server.enrolment.authority import make_authority
from headwater.server.page.hub import Hub
from headwater.server.page.page_server import check_page_address, serving
from headwater.server.page.web import FILES, page_app
from headwater.server.report.replay import FinishedRun
from tests.certificates import credentials_of
from tests.round_rows import row
from tests.server.report.test_replay import write

TOKEN = "a-secret-of-this-run"


@pytest.fixture
def run(tmp_path: Path) -> FinishedRun:
    return FinishedRun(write(tmp_path / "run", row(1, "a"), row(2, "a")))


class Browser:
    """Sends requests to the application, in one event loop each, and keeps its cookies."""

    def __init__(self, run: FinishedRun, token: str | None, url: str) -> None:
        self._app = page_app(run, Hub(run), token=token)
        self._url = url
        self._cookies = httpx.Cookies()

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app=self._app)
            async with httpx.AsyncClient(
                transport=transport, base_url=self._url, cookies=self._cookies
            ) as client:
                answer = await client.request(method, path, **more)
                self._cookies = client.cookies
                return answer

        return asyncio.run(send())


def client_of(run: FinishedRun, token: str | None = None, url: str = "http://localhost") -> Browser:
    return Browser(run, token, url)


def test_it_serves_its_own_files_and_no_others(run: FinishedRun) -> None:
    client = client_of(run)
    assert "<title>Headwater</title>" in client.get("/").text
    for name in FILES:
        assert client.get(f"/static/{name}").status_code == 200
    for path in ("/static/web.py", "/static/..%2Fweb.py", "/static/%2e%2e/web.py", "/etc/passwd"):
        assert client.get(path).status_code == 404


def test_every_answer_forbids_foreign_code(run: FinishedRun) -> None:
    for path in ("/", "/static/page.js", "/state", "/nothing"):
        headers = client_of(run).get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_nothing_can_be_sent_to_it(run: FinishedRun, method: str) -> None:
    for path in ("/", "/state", "/device", "/changes"):
        assert client_of(run).request(method, path).status_code == 405


def test_a_device_has_its_history(run: FinishedRun) -> None:
    points = client_of(run).get("/device", params={"name": "a"}).json()
    assert [point["round"] for point in points] == [1, 2]
    assert client_of(run).get("/device", params={"name": "../../etc"}).json() == []


def test_without_the_token_every_request_is_refused(run: FinishedRun) -> None:
    client = client_of(run, TOKEN, "https://server")
    for path in ("/", "/state", "/static/page.js", "/changes", "/nothing", "/?token=wrong"):
        answer = client.get(path)
        assert answer.status_code == 403
        assert TOKEN not in answer.text


def test_the_link_with_the_token_opens_the_page_and_hides_the_token(run: FinishedRun) -> None:
    client = client_of(run, TOKEN, "https://server")
    answer = client.get("/", params={"token": TOKEN})
    assert answer.headers["location"] == "/"
    cookie = answer.headers["set-cookie"]
    assert all(word in cookie for word in ("HttpOnly", "Secure", "SameSite=strict"))
    assert json.loads(client.get("/state").text)["num_points"] == 2, "the cookie is enough"


def test_on_loopback_another_sites_name_is_refused(run: FinishedRun) -> None:
    assert client_of(run, url="http://evil.example").get("/state").status_code == 400
    for host in ("127.0.0.1:8600", "localhost", "[::1]:8600", "127.0.0.2:8600"):
        assert client_of(run, url=f"http://{host}").get("/state").status_code == 200


def test_beyond_loopback_the_page_needs_certificates() -> None:
    check_page_address("127.0.0.1:0", has_tls=False)
    check_page_address("0.0.0.0:8600", has_tls=True)
    with pytest.raises(InsecureAddress, match=r"--page 0\.0\.0\.0:8600"):
        check_page_address("0.0.0.0:8600", has_tls=False)
    with pytest.raises(SettingsError):
        check_page_address("8600", has_tls=True)


@pytest.mark.slow
def test_while_it_serves_no_copy_of_the_key_is_on_the_disk(
    run: FinishedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, scratch = tmp_path / "certs", tmp_path / "scratch"
    make_authority(folder, hosts=["127.0.0.1"])
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    app = page_app(run, Hub(run), token=None)
    with serving(app, "127.0.0.1:0", credentials_of(folder, "server")) as link:
        own = ssl.create_default_context(cafile=folder / "ca.pem")
        assert httpx.get(link, verify=own).status_code == 200
        assert not [*scratch.iterdir()]
