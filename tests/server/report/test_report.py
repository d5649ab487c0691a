"""report.html: one file with everything inside, in which no text of the data becomes code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from torch import nn
from typer.testing import CliRunner

from headwater.common.settings.schema import Settings
from headwater.server.cli import app
from headwater.server.operations.round_log import REPORT
from headwater.server.report import report
from tests.round_rows import client, row
from tests.server.report.test_replay import write

HOSTILE = "</script><script>alert(1)</script>"


def state_in(page: str) -> dict[str, object]:
    found = re.search(r'id="state-of-run">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    state: dict[str, object] = json.loads(found[1])
    return state


def test_the_file_names_no_other_file(tmp_path: Path) -> None:
    report.write_report(write(tmp_path / "run", row(1, "a", "b")))
    page = (tmp_path / "run" / REPORT).read_text()
    assert "static/" not in page
    assert "http-equiv" in page
    assert not re.search(r'(src|href)="(?!#)', page)
    histories = state_in(page)["histories"]
    assert isinstance(histories, dict)
    assert set(histories) == {"a", "b"}


def test_a_hostile_name_stays_a_text(tmp_path: Path) -> None:
    report.write_report(write(tmp_path / "run", row(1, "a", metrics={HOSTILE: 1.0})))
    page = (tmp_path / "run" / REPORT).read_text()
    assert HOSTILE not in page
    assert HOSTILE in json.dumps(state_in(page)["points"])


def test_a_device_that_claims_no_time_at_all_breaks_no_report(tmp_path: Path) -> None:
    fast = client("a", seconds=5e-324)  # six examples in it are more a second than a float holds
    report.write_report(write(tmp_path / "run", row(1, clients=[fast])))
    devices = state_in((tmp_path / "run" / REPORT).read_text())["devices"]
    assert isinstance(devices, list)
    assert devices[0]["speed"] is None


def test_a_report_of_many_devices_stays_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "MAX_DEVICE_POINTS", 60)
    names = [f"d{n}" for n in range(10)]
    report.write_report(write(tmp_path / "run", *[row(n, *names) for n in range(1, 31)]))
    histories = state_in((tmp_path / "run" / REPORT).read_text())["histories"]
    assert isinstance(histories, dict)
    assert sum(map(len, histories.values())) <= 60


def test_without_a_round_there_is_no_report_and_no_complaint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = report.ReportWriter()
    writer.started(Settings(out=tmp_path), round_number=0, model=nn.Linear(1, 1))
    writer.ended()
    assert not (tmp_path / REPORT).exists()
    assert not caplog.records


def test_where_the_page_is_not_installed_the_log_says_what_writes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "run", row(1, "a"))
    (folder / REPORT).unlink(missing_ok=True)
    caplog.set_level("INFO")
    with monkeypatch.context() as bundle:
        bundle.setattr(report, "STATIC", tmp_path / "not in the bundle")
        writer = report.ReportWriter()
        writer.started(Settings(out=folder), round_number=0, model=nn.Linear(1, 1))
        writer.ended()
    assert not (folder / REPORT).exists()
    assert f"headwater-server report --out {folder} --html" in caplog.text
    done = CliRunner().invoke(app, ["report", "--out", str(folder), "--html"])
    assert done.exit_code == 0, done.output
    assert state_in((folder / REPORT).read_text())["num_points"] == 1
