"""Writes report.html: the page of a finished run in one file, which opens without a server."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from torch import nn

from headwater.common.errors import HeadwaterError
from headwater.common.settings.schema import Settings
from headwater.common.system.atomic_file import write_atomically
from headwater.common.wording import natural
from headwater.server.operations.round_log import REPORT
from headwater.server.report.diagnosis import diagnose
from headwater.server.report.replay import FinishedRun
from headwater.server.rounds.observer import Observer

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
# A report stays small enough for an e-mail: so many rounds of devices, over all of them.
MAX_DEVICE_POINTS = 6_000
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"


class ReportWriter(Observer):
    """Writes the report of a run with a folder when the run ends."""

    def __init__(self) -> None:
        self._folder: Path | None = None

    def started(self, settings: Settings, *, round_number: int, model: nn.Module) -> None:
        self._folder = settings.out

    def ended(self) -> None:
        """Write the report; without a committed round, or on a full disk, there is none."""
        if self._folder is None:
            return
        if not STATIC.exists():
            log.info(
                "no %s: Flower's bundle of this app holds no page; where Headwater is installed, "
                "`headwater-server report --out %s --html` writes it",
                REPORT,
                self._folder,
            )
            return
        try:
            write_report(self._folder)
        except HeadwaterError as error:
            log.debug("no %s: %s", REPORT, error)
        except OSError as error:
            log.warning("no %s in %s: %s", REPORT, self._folder, error.strerror)


def write_report(folder: Path) -> Path:
    """Write the report of a folder's rounds into it; return its path.

    Raises:
        SettingsError: the folder holds no rounds.
        StateError: its rounds cannot be read.
        OSError: the file cannot be written.
    """
    run = FinishedRun(folder)
    points, number = run.all_points()
    names = sorted(run.tiles(), key=natural)
    each = max(MAX_DEVICE_POINTS // max(len(names), 1), 20)
    state = {
        "about": run.about,
        "status": run.status() | {"phase": "ended"},
        "points": points,
        "num_points": number,
        "devices": [*run.tiles().values()],
        "diagnosis": [*run.notes(), *diagnose(points)],
        "histories": {
            run.tiles()[name]["name"]: run.device(name)[-each:]
            for name in names[: MAX_DEVICE_POINTS // each]
        },
    }
    path = folder / REPORT
    write_atomically(path, report_html(state).encode())
    return path


def report_html(state: object) -> str:
    """Return the page with its scripts, its style and its data inside."""
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    # Within a script element no text of the data may look like the element's end.
    data = json.dumps(state, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    policy = f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    lines, scripts = [], [f'<script type="application/json" id="state-of-run">{data}</script>']
    for line in page.splitlines():
        if 'href="static/style.css"' in line:
            lines += [policy, f"<style>\n{_file('style.css')}</style>"]
        elif 'href="static/mark.svg"' in line:
            continue
        elif line.startswith("<script"):
            name = line.partition("static/")[2].partition('"')[0]
            scripts.append(f"<script>\n{_file(name)}</script>")
        elif line == "</body>":
            lines += [*scripts, line]
        else:
            lines.append(line)
    return "\n".join(lines) + "\n"


def _file(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")
