"""The spool: a half-summed window on disk, so that it outlives a power cut.

Behind a micro-batch, now and then, the vector and all that is known of the window are written to
``DIR/NAME-RUN.safetensors``: beside the old file, forced to disk, renamed over it, with a SHA-256
inside. If after a restart the same plan comes again for the same model, the sum goes on behind what
is there, and the result is that of an unbroken window, to the bit. The seconds that have passed by
the wall clock count; past the deadline what is there is sent. A file that belongs to anything else,
or is damaged, is thrown away, and the log says why.

The file holds a sum of gradients and positions in the device's data: only its owner may read it. A
disk that is full costs the spool, never the round.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headwater.client.training.accumulation import WindowSum
from headwater.client.training.context import Workplace
from headwater.client.training.micro_batches import Window
from headwater.common.messages import Plan, Step
from headwater.common.system.atomic_file import OWNER_ONLY, whole_file

log = logging.getLogger(__name__)

# Each write is 4 bytes per parameter, on an SD card as like as not: no more often than this, and
# for no more than this share of the time.
EVERY_SECONDS = 5.0
LARGEST_SHARE = 1 / 20

# A file of a run that has not been written for so long is that of a run long ended.
STALE_SECONDS = 7 * 86_400.0

MOST_HEADER_BYTES = 100_000_000  # safetensors' own bound
VECTOR = "values_P"


class Spool:
    """One device's file in a run."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        run_id: int,
        every_seconds: float = EVERY_SECONDS,
        largest_share: float = LARGEST_SHARE,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._name = name
        self.path = folder / f"{name}-{run_id}.safetensors"
        self.run_id = run_id
        self.every_seconds = every_seconds
        self.largest_share = largest_share
        self.wall_clock = wall_clock

    def opened(
        self, plan: Plan, window: Window, place: Workplace, start_seconds: float
    ) -> SpooledWindow:
        """Return the spool of one window, which began at ``start_seconds`` of the place's clock."""
        return SpooledWindow(self, plan, window, place, start_seconds)

    def sweep(self) -> None:
        """Remove what other runs of this device left long ago, each 4 bytes per parameter."""
        is_left = re.compile(re.escape(self._name) + r"-\d+\.safetensors(\.part)?").fullmatch
        for path in self.path.parent.iterdir():
            age = self.wall_clock() - path.stat().st_mtime if is_left(path.name) else 0.0
            if age > STALE_SECONDS:
                path.unlink(missing_ok=True)
                log.warning("%s is removed: it has not been written for a week", path)

    def remove(self) -> None:
        """Remove the file, and what a kill in mid-write left beside it.

        Its update was handed over, or will never be.
        """
        for path in (self.path, self.path.with_name(self.path.name + ".part")):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


class _Unusable(Exception):
    """The file does not belong to the window, or is damaged."""


class SpooledWindow:
    """Takes up a window from the file, and keeps it there."""

    def __init__(
        self, spool: Spool, plan: Plan, window: Window, place: Workplace, start_seconds: float
    ) -> None:
        self._spool = spool
        self._plan = plan
        self._window = window
        self._place = place
        self._begun_at = spool.wall_clock()
        self._image_digest: str | None = None
        self._next_at = place.clock.seconds() + spool.every_seconds
        self._is_given_up = False
        self.start_seconds = start_seconds

    # Taking up.

    def take_up(self) -> WindowSum | None:
        """Return what was summed of this window; the vector holds it.

        None if there is no file, or none that belongs here. ``start_seconds`` is then, by the
        place's clock, when the window began: as long ago as the wall clock says, or as it had been
        worked on, where a clock without a battery fell behind.
        """
        path = self._spool.path
        self._place.accumulator.zero()
        try:
            with path.open("rb") as file:
                total = self._read(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (_Unusable, OSError) as error:
            log.warning("%s is thrown away: %s", path, error)
            self._spool.remove()
            return None
        except (ValueError, KeyError, TypeError) as error:
            log.warning("%s is thrown away: it is damaged (%s)", path, error)
            self._spool.remove()
            return None
        log.warning(
            "%s, round %d: goes on behind %d of %d examples, which were summed before a restart",
            self._place.name,
            self._plan.round,
            total.num_examples,
            len(self._window.positions),
        )
        return total

    def _read(self, file: io.BufferedReader) -> WindowSum:
        """Read the file into the vector.

        Raises:
            _Unusable, OSError, ValueError, KeyError, TypeError: it cannot be used.
        """
        num_header_bytes = int.from_bytes(file.read(8), "little")
        if num_header_bytes > MOST_HEADER_BYTES:
            raise _Unusable("it is damaged")
        header = json.loads(file.read(num_header_bytes))
        text, digest = header["__metadata__"]["state"], header["__metadata__"]["sha256"]
        state = json.loads(text)
        self._check_belongs(state["belongs"])
        vector = self._vector()
        if file.readinto(vector) != len(vector) or file.read(1):
            raise _Unusable("it is damaged: it is too short, or too long")
        if self._digest(text) != digest:
            raise _Unusable("it is damaged: its digest is another")
        total = _total(state)
        positions = [p for group in (*total.taken, *total.left, total.refused) for p in group]
        if sorted(positions) != sorted(self._window.positions):
            raise _Unusable("it holds other examples")
        self._begun_at = state["begun_at"]
        passed = max(self._spool.wall_clock() - self._begun_at, state["worked_seconds"])
        self.start_seconds -= passed
        return total

    def _check_belongs(self, found: Mapping[str, Any]) -> None:
        expected = self._belongs()
        for what, value in expected.items():
            if found[what] != value:
                raise _Unusable(f"it belongs to {what} {found[what]}, not {value}")
        if found["model"] != self._model():
            raise _Unusable("it belongs to another model")

    # Keeping.

    def keep(self, total: WindowSum) -> None:
        """Write what is summed so far, if it is time for it."""
        now = self._place.clock.seconds()
        if now < self._next_at or self._is_given_up or not total.taken:
            return
        try:
            self._write(total, worked_seconds=now - self.start_seconds)
        except OSError as error:
            self._is_given_up = True
            log.warning(
                "%s, round %d: the spool cannot be written, and a power cut would cost the round: "
                "%s",
                self._place.name,
                self._plan.round,
                error,
            )
        done = self._place.clock.seconds()
        rest = (done - now) / self._spool.largest_share
        self._next_at = done + max(self._spool.every_seconds, rest)

    def _write(self, total: WindowSum, *, worked_seconds: float) -> None:
        path, vector = self._spool.path, self._vector()
        text = json.dumps(
            {
                "belongs": {**self._belongs(), "model": self._model()},
                "begun_at": self._begun_at,
                "worked_seconds": worked_seconds,
                **_state(total),
            }
        )
        metadata = {"state": text, "sha256": self._digest(text)}
        shape = {"dtype": "F32", "shape": [len(vector) // 4], "data_offsets": [0, len(vector)]}
        header = json.dumps({"__metadata__": metadata, VECTOR: shape}).encode()
        header += b" " * (-len(header) % 8)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._spool.sweep()
        # By hand, and not by safetensors, which would copy the vector.
        with whole_file(path, mode=OWNER_ONLY) as part, part.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.write(vector)

    # What the file belongs to.

    def _belongs(self) -> dict[str, Any]:
        plan, window = self._plan, self._window
        return {
            "run": self._spool.run_id,
            "round": plan.round,
            "version": plan.model_version,
            "epoch": window.epoch,
            "offset": window.offset,
            "layout": self._place.image.layout.digest,
            "plan": hashlib.sha256(plan.model_dump_json().encode()).hexdigest(),
        }

    def _model(self) -> str:
        """Return the digest of the model, which does not change within a window."""
        if self._image_digest is None:
            self._image_digest = hashlib.sha256(self._place.image.buffer()).hexdigest()
        return self._image_digest

    def _vector(self) -> memoryview:
        return self._place.accumulator.values_P.numpy().data.cast("B")

    def _digest(self, state: str) -> str:
        digest = hashlib.sha256(state.encode())
        digest.update(self._vector())
        return digest.hexdigest()


def _state(total: WindowSum) -> dict[str, Any]:
    """Return a window's state as plain data; every float comes back to the bit."""
    return {
        "loss_sum": total.loss_sum,
        "weight": total.weight,
        "metric_sums": total.metric_sums,
        "steps": [asdict(step) for step in total.steps],
        "taken": total.taken,
        "left": list(total.left),
        "refused": total.refused,
        "num_cut_smaller": total.num_cut_smaller,
        "micro_batch_size": total.micro_batch_size,
    }


def _total(state: Mapping[str, Any]) -> WindowSum:
    taken = [tuple(group) for group in state["taken"]]
    return WindowSum(
        loss_sum=state["loss_sum"],
        weight=state["weight"],
        num_examples=sum(map(len, taken)),
        metric_sums=state["metric_sums"],
        steps=[Step(**step) for step in state["steps"]],
        taken=taken,
        left=deque(tuple(group) for group in state["left"]),
        refused=state["refused"],
        num_cut_smaller=state["num_cut_smaller"],
        micro_batch_size=state["micro_batch_size"],
    )
