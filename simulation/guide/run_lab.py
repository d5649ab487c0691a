"""A small federated training that a reader sets up with sliders and watches: the real simulator."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path
from typing import Any

from headwater.common.errors import HeadwaterError
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.page.run_view import RunView
from headwater.server.rounds.observer import Observer, Observers
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine

ROUNDS = 60
TASK = "headwater.examples.digits:Digits"
FAST_EXAMPLES_PER_SECOND = 400
FLEET = """
[[device]]
count = {count}
examples_per_second = {speed}
memory_bytes = 1_000_000_000
upload_bytes_per_second = 2_500_000
micro_batch_seconds = 0.002
cores = 2
"""


class Superseded(HeadwaterError):
    """The reader has started another run."""


class RunLab:
    """One run at a time, in a thread; a new one ends the one before it."""

    def __init__(self) -> None:
        self.view: RunView | None = None
        self.fault = ""
        self._lock = threading.Lock()
        self._number = 0
        self._thread: threading.Thread | None = None

    def start(self, given: dict[str, Any], *, spread: float) -> None:
        """End the run in progress and start another one with these settings, by dotted keys.

        Half of the devices are slower by ``spread``. Settings that do not go together start nothing
        and are the lab's ``fault``.
        """
        self.stop()
        with self._lock:
            devices = int(given["simulation.clients"])
            fleet = tempfile.NamedTemporaryFile("w", suffix=".toml", delete=False)  # noqa: SIM115
            with fleet:
                slow = devices // 2
                for count, by in ((devices - slow, 1.0), (slow, spread)):
                    fleet.write(FLEET.format(count=count, speed=FAST_EXAMPLES_PER_SECOND / by))
            fixed = {"task": TASK, "rounds": ROUNDS, "simulation.fleet": fleet.name}
            try:
                settings = with_fleet(load(None, given | fixed))
            except HeadwaterError as error:
                Path(fleet.name).unlink()
                self.view, self.fault = None, f"{error.code}: {error}; {error.remedy or ''}"
                return
            self.fault, self.view = "", RunView(settings)
            self._thread = threading.Thread(
                target=self._run, args=(settings, self._number, Path(fleet.name)), daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the run in progress, after its round."""
        with self._lock:
            self._number += 1
            if self._thread is not None:
                self._thread.join()
                self._thread = None

    def finish(self) -> None:
        """Wait until the run in progress has done its rounds."""
        with self._lock:
            if self._thread is not None:
                self._thread.join()

    def state(self) -> dict[str, Any]:
        """Return where the run is, and its rounds so far."""
        view = self.view
        if view is None:
            return {"status": None, "points": [], "devices": [], "fault": self.fault}
        return {
            "status": view.status(),
            "points": view.all_points()[0],
            "devices": [*view.tiles().values()],
            "fault": self.fault,
        }

    def _run(self, settings: Settings, number: int, fleet: Path) -> None:
        lab, view = self, self.view
        assert view is not None

        class Stopping(Observer):
            def stepped(self, row: RoundRow) -> None:
                if lab._number != number:
                    raise Superseded("another run was started")

        try:
            run_engine(
                settings,
                on_round=lambda row: None,
                resume=False,
                observer=Observers(Stopping(), view),
            )
        except Superseded:
            pass
        except HeadwaterError as error:
            self.fault = f"{error.code}: {error}"
        finally:
            fleet.unlink(missing_ok=True)
