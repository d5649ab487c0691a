"""The spool: the partial sum of a window on disk, which survives a power cut.

After a micro-batch, now and then, the vector and the window's state are written to
``DIR/NAME-RUN.safetensors``: to a new file with a SHA-256 inside, forced to disk and renamed over
the old one. If the same plan comes again after a restart, for the same model, the sum continues
from the file, and the result equals that of an uninterrupted window, to the bit. Wall-clock time
counts towards the deadline; after the deadline the partial sum is sent. A file that belongs to
another window, or is damaged, is deleted, and the log says why.

With local steps the file has the parameters and the local optimizer's state after a step, and a
power cut costs the step that it interrupts (``headwater.client.local_training.step_spool``).

The file holds a sum of gradients and positions in the client's data, so only its owner may read it.
A full disk costs the spool, never the round.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headwater.client.training.context import TrainingContext
from headwater.client.training.sampler import Window
from headwater.client.training.spool_content import (
    SpoolContent,
    SummedVector,
    bytes_of,
    digest_of,
    plain_totals,
    totals_of,
)
from headwater.client.training.window_sum import WindowSum
from headwater.common.messages import Plan
from headwater.common.parsed_text import json_of
from headwater.common.system.atomic_file import OWNER_ONLY, atomic_writer, make_private_folder

log = logging.getLogger(__name__)

# Each write is 4 bytes per parameter, likely to an SD card: no more often than this, and for no
# more than this share of the time.
EVERY_SECONDS = 5.0
MAX_SHARE = 1 / 20

# A file that has not been written for so long belongs to a run that ended.
STALE_SECONDS = 7 * 86_400.0

MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
VECTOR = "values_P"


class Spool:
    """One client's spool file in a run."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        run_id: int,
        every_seconds: float = EVERY_SECONDS,
        max_share: float = MAX_SHARE,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._name = name
        self.path = folder / f"{name}-{run_id}.safetensors"
        self.run_id = run_id
        self.every_seconds = every_seconds
        self.max_share = max_share
        self.wall_clock = wall_clock

    def open(
        self,
        plan: Plan,
        window: Window,
        context: TrainingContext,
        start_seconds: float,
        content: SpoolContent | None = None,
    ) -> SpooledWindow:
        """Return the spool of a window that began at ``start_seconds`` of the context's clock.

        Its content is the accumulator's vector, or another.
        """
        own = content or SummedVector(context.accumulator)
        return SpooledWindow(self, plan, window, context, start_seconds, own)

    def remove_stale(self) -> None:
        """Remove old files of this client's other runs, each 4 bytes per parameter."""
        is_own = re.compile(re.escape(self._name) + r"-\d+\.safetensors(\.part)?").fullmatch
        for path in self.path.parent.iterdir():
            age = self.wall_clock() - path.stat().st_mtime if is_own(path.name) else 0.0
            if age > STALE_SECONDS:
                path.unlink(missing_ok=True)
                log.warning("%s is removed: it has not been written for a week", path)

    def remove(self) -> None:
        """Remove the file, and a temporary file that a kill left: the update needs it no more."""
        for path in (self.path, self.path.with_name(self.path.name + ".part")):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


class _Unusable(Exception):
    """The file belongs to another window, or is damaged."""


class SpooledWindow:
    """Loads and saves one window's partial sum."""

    def __init__(
        self,
        spool: Spool,
        plan: Plan,
        window: Window,
        context: TrainingContext,
        start_seconds: float,
        content: SpoolContent,
    ) -> None:
        self._content = content
        self._spool = spool
        self._plan = plan
        self._window = window
        self._context = context
        self._begun_at = spool.wall_clock()
        self._image_digest: str | None = None
        self._next_at = context.clock.seconds() + spool.every_seconds
        self._has_failed = False
        self.start_seconds = start_seconds

    # Loading.

    def load(self) -> WindowSum | None:
        """Load the window's content, such as its partial sum; None if no usable file exists.

        ``start_seconds`` becomes the time, by the context's clock, at which the window began: as
        long ago as the wall clock says, or as long as was trained if a clock without a battery says
        less.
        """
        path = self._spool.path
        self._context.accumulator.zero()
        try:
            with path.open("rb") as file:
                total = self._read(file)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (_Unusable, OSError, ValueError, KeyError, TypeError) as error:
            is_known = isinstance(error, _Unusable | OSError)
            why = str(error) if is_known else f"it is damaged ({error})"
            log.warning("%s is deleted: %s", path, why)
            self._spool.remove()
            return None
        log.warning(
            "%s, round %d: continues after %d of %d examples, which were summed before a restart",
            self._context.name,
            self._plan.round,
            total.num_examples,
            len(self._window.positions),
        )
        return total

    def _read(self, file: io.BufferedReader) -> WindowSum:
        """Read the file into the content.

        Raises:
            _Unusable, OSError, ValueError, KeyError, TypeError: the file cannot be used.
        """
        num_header_bytes = int.from_bytes(file.read(8), "little")
        if num_header_bytes > MAX_HEADER_BYTES:
            raise _Unusable("it is damaged")
        header = json_of(file.read(num_header_bytes))
        text, digest = header["__metadata__"]["state"], header["__metadata__"]["sha256"]
        state = json_of(text)
        self._check_belongs(state["belongs"])
        plain = state.get("content", {})
        num_bytes = os.fstat(file.fileno()).st_size - file.tell()
        if num_bytes % 4:
            raise _Unusable("it is damaged: it is too short, or too long")
        read = self._content.room(plain, num_bytes // 4)
        vector = bytes_of(read)
        if file.readinto(vector) != len(vector):
            raise _Unusable("it is damaged: it is too short, or too long")
        if digest_of(text, [read]) != digest:
            raise _Unusable("it is damaged: its digest does not match")
        total = totals_of(state)
        positions = [p for group in (*total.done, *total.remaining, total.refused) for p in group]
        if sorted(positions) != sorted(self._window.positions):
            raise _Unusable("it holds other examples")
        self._begun_at = state["begun_at"]
        self._content.take(plain, read)
        passed = max(self._spool.wall_clock() - self._begun_at, state["worked_seconds"])
        self.start_seconds -= passed
        return total

    def _check_belongs(self, stored: Mapping[str, Any]) -> None:
        for key, value in self._belongs().items():
            if stored[key] != value:
                raise _Unusable(f"it belongs to {key} {stored[key]}, not {value}")
        if stored["model"] != self._model():
            raise _Unusable("it belongs to another model")

    # Saving.

    def save(self, total: WindowSum) -> None:
        """Write the partial sum if enough time has passed since the last write."""
        now = self._context.clock.seconds()
        if now < self._next_at or self._has_failed or not total.done:
            return
        try:
            self._write(total, worked_seconds=now - self.start_seconds)
        except OSError as error:
            self._has_failed = True
            log.warning(
                "%s, round %d: the spool cannot be written, so a power cut would cost the round: "
                "%s",
                self._context.name,
                self._plan.round,
                error,
            )
        end = self._context.clock.seconds()
        self._next_at = end + max(self._spool.every_seconds, (end - now) / self._spool.max_share)

    def _write(self, total: WindowSum, *, worked_seconds: float) -> None:
        path, tensors = self._spool.path, self._content.tensors()
        text = json.dumps(
            {
                "belongs": {**self._belongs(), "model": self._model()},
                "begun_at": self._begun_at,
                "worked_seconds": worked_seconds,
                "content": self._content.plain(),
                **plain_totals(total),
            }
        )
        metadata = {"state": text, "sha256": digest_of(text, tensors)}
        length = sum(tensor.numel() for tensor in tensors)
        shape = {"dtype": "F32", "shape": [length], "data_offsets": [0, 4 * length]}
        header = json.dumps({"__metadata__": metadata, VECTOR: shape}).encode()
        header += b" " * (-len(header) % 8)
        make_private_folder(path.parent)
        self._spool.remove_stale()
        # Written by hand: the safetensors library would copy the vector.
        with atomic_writer(path, mode=OWNER_ONLY) as part, part.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for tensor in tensors:
                file.write(bytes_of(tensor))

    # The window that the file belongs to.

    def _belongs(self) -> dict[str, Any]:
        plan, window = self._plan, self._window
        return {
            "run": self._spool.run_id,
            "round": plan.round,
            "version": plan.model_version,
            "epoch": window.place.epoch,
            "offset": window.place.offset,
            "skipped": list(window.place.skipped),
            "layout": self._context.image.layout.digest,
            "plan": hashlib.sha256(plan.model_dump_json().encode()).hexdigest(),
        }

    def note_model(self) -> None:
        """Take the model's digest now: local steps will change the model."""
        self._model()

    def _model(self) -> str:
        """Return the digest of the model that the window began with."""
        if self._image_digest is None:
            image = self._context.image
            digest = hashlib.sha256(image.digest)
            digest.update(image.local_L.numpy().data)
            self._image_digest = digest.hexdigest()
        return self._image_digest
