"""The sum of a device without a link: further windows under its last plan, in one file.

A device that cannot deliver its update goes on with the next examples under the same plan and the
same model, and adds each window to the sum. The file has the whole sum with its report, its plan
and the device's place in its examples, and is replaced as a whole after each window: a kill costs
the window in progress. The sum is delivered as the answer to the next plan, hours or days later, as
one update of (sum, weight): it counts for what it is.

The file is removed when the server has received the sum. If the server then loses it, or refuses
it, the place in the examples is that before the first window: all of them are used again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from headwater.client.flower.state_file import read_sampler
from headwater.client.training.sampler import SamplerState
from headwater.common.errors import FeatureMissing, StateError
from headwater.common.messages import MAX_STEPS, Plan, UpdateReport
from headwater.common.model.vectors import CHUNK, all_finite
from headwater.common.parsed_text import json_of
from headwater.common.system.atomic_file import OWNER_ONLY, atomic_writer, make_private_folder

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class OfflineSum:
    """All of a sum but its vector."""

    plan: Plan
    report: UpdateReport
    sampler: SamplerState
    """With the place after the last window pending, and the one before the first as it is."""

    @property
    def has_room(self) -> bool:
        """Whether the report has room for the steps of one more window."""
        return self.report.num_steps + self.plan.accumulation_steps < MAX_STEPS

    @property
    def next_sampler(self) -> SamplerState:
        """The state with which the next window begins where the last one ended."""
        return SamplerState(place=self.sampler.pending_place)

    def after(self, report: UpdateReport, sampler: SamplerState) -> OfflineSum:
        """Return the sum after one more window."""
        place = self.sampler.pend(self.plan.round, sampler.pending_place, sampler.pending_order)
        return OfflineSum(plan=self.plan, report=merged(self.report, report), sampler=place)


def merged(before: UpdateReport, window: UpdateReport) -> UpdateReport:
    """Return the report of a sum after one more window of the same plan."""
    metrics = Counter(before.metric_sums)
    metrics.update(window.metric_sums)
    return window.model_copy(
        update={
            "num_examples": before.num_examples + window.num_examples,
            "weight": before.weight + window.weight,
            "loss_sum": before.loss_sum + window.loss_sum,
            "metric_sums": dict(metrics),
            "num_refused": before.num_refused + window.num_refused,
            "num_joined": before.num_joined + window.num_joined,
            "num_owned": before.num_owned if window.num_owned is None else window.num_owned,
            "num_left": before.num_left + window.num_left,
            "seconds": before.seconds + window.seconds,
            "steps": (*before.steps, *window.steps),
            "local_steps": before.local_steps + window.local_steps,
            "unused": tuple(at for at in before.unused if at in window.unused),
            "num_windows": before.num_windows + window.num_windows,
        }
    )


class OfflineSumFile:
    """The file of one device's sum in one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> OfflineSum | None:
        """Return the sum without its vector; None if there is no file, or a damaged one."""
        return self._read(None)

    def load_into(self, values_P: Tensor) -> OfflineSum | None:
        """Return the sum, and overwrite ``values_P`` with its vector; None as ``read``."""
        return self._read(values_P)

    def write(self, kept: OfflineSum, values_P: Tensor) -> None:
        """Replace the file.

        Raises:
            StateError: the disk is full or not writable; the file before is intact.
        """
        text = json.dumps(
            {
                "plan": kept.plan.model_dump(mode="json"),
                "report": kept.report.model_dump(mode="json"),
                "sampler": asdict(kept.sampler),
            }
        )
        vector = values_P.numpy().data.cast("B")
        header = json.dumps({"sum": text, "sha256": _digest(text, vector)}).encode()
        try:
            make_private_folder(self.path.parent)
            with atomic_writer(self.path, mode=OWNER_ONLY) as part, part.open("wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                file.write(vector)
        except OSError as error:
            raise StateError(
                f"the device cannot keep its sum in {self.path}: {error.strerror}"
            ) from error

    def add_to(self, values_P: Tensor) -> bool:
        """Add the file's vector to ``values_P``; False if it is damaged, or the sum overflows.

        In chunks: no second vector is in memory.
        """
        try:
            with self.path.open("rb") as file:
                header = json_of(file.read(int.from_bytes(file.read(8), "little")))
                digest = hashlib.sha256(header["sum"].encode())
                for into in torch.split(values_P, CHUNK):
                    data = bytearray(file.read(4 * len(into)))
                    digest.update(data)
                    into += torch.frombuffer(data, dtype=torch.float32)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            log.warning("%s cannot be read: %s", self.path, error)
            return False
        return digest.hexdigest() == header["sha256"] and all_finite(values_P)

    def remove(self) -> None:
        """Remove the file, if there is one."""
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _read(self, values_P: Tensor | None) -> OfflineSum | None:
        try:
            with self.path.open("rb") as file:
                num_bytes = int.from_bytes(file.read(8), "little")
                if num_bytes > MAX_HEADER_BYTES:
                    raise ValueError("its header is too long")
                header = json_of(file.read(num_bytes))
                if values_P is not None:
                    vector = values_P.numpy().data.cast("B")
                    if file.readinto(vector) != len(vector) or file.read(1):
                        raise ValueError("it has another length")
                    if _digest(header["sum"], vector) != header["sha256"]:
                        raise ValueError("its digest does not match")
            return _parse(json_of(header["sum"]))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, KeyError, TypeError, ValidationError, FeatureMissing) as error:
            log.warning("%s is deleted, and its examples are used again: %s", self.path, error)
            self.remove()
            return None


def _parse(plain: Mapping[str, Any]) -> OfflineSum:
    return OfflineSum(
        plan=Plan.model_validate_json(json.dumps(plain["plan"])),
        report=UpdateReport.model_validate_json(json.dumps(plain["report"])),
        sampler=read_sampler(plain["sampler"]),
    )


def _digest(text: str, vector: memoryview) -> str:
    digest = hashlib.sha256(text.encode())
    digest.update(vector)
    return digest.hexdigest()
