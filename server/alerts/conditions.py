"""Which troubles a run has now, by what is known of it: pure functions of figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headwater.common.errors import CertificateRevoked
from headwater.common.settings.schema import AlertSettings
from headwater.common.wording import bytes_text, duration_text
from headwater.server.transport.device_records import DeviceRecord

Trouble = tuple[str, str]
"""Its kind, and what it is of: a device, a file; "" of the run."""
MIN_LOSSES = 20
"""Rounds that say what the loss was, and as many that say what it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WatchedRun:
    """What is known of a run; times are seconds since 1970."""

    now: float
    last_round_at: float
    """When the last round was committed, or the server began to listen."""
    round: int = 0
    is_paused: bool = False
    losses: Sequence[float] = ()
    """Of the latest rounds, in their order; NaN where it is hidden."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Of the weight of the latest rounds, by device."""
    spent: tuple[float, float] | None = None
    """The epsilon so far, and the one that the run may spend."""
    devices: Collection[DeviceRecord] = ()
    certificates: Mapping[str, float] = field(default_factory=dict)
    """When each ends, by the name of whose it is."""
    free_bytes: int | None = None
    folder: str = ""


def troubles(state: WatchedRun, chosen: AlertSettings) -> dict[Trouble, str]:
    """Return what is wrong, in words, by its kind and subject."""
    found = [
        *_of_rounds(state, chosen),
        *_of_loss(state, chosen),
        *_of_devices(state, chosen),
        *_of_machine(state, chosen),
    ]
    return {(kind, subject): text for kind, subject, text in found}


def _of_rounds(state: WatchedRun, chosen: AlertSettings) -> Iterator[tuple[str, str, str]]:
    silent = state.now - state.last_round_at
    if not state.is_paused and silent >= chosen.silent_seconds:
        yield "no-round", "", f"no round for {duration_text(silent)}, the last was {state.round}"
    if state.spent is not None and state.spent[0] >= chosen.budget_share * state.spent[1]:
        so_far, most = state.spent
        yield "budget", "", f"the run has spent epsilon {so_far:.3g} of {most:g}"
    for name, share in state.shares.items():
        if share > chosen.largest_share and len(state.shares) > 1:
            yield "share", name, f"{name} is {share:.0%} of the weight of the latest rounds"


def _of_loss(state: WatchedRun, chosen: AlertSettings) -> Iterator[tuple[str, str, str]]:
    known = [loss for loss in state.losses if not math.isnan(loss)]
    if any(math.isinf(loss) for loss in known[-1:]):
        yield "loss", "", f"the loss of round {state.round} is infinite"
        return
    if len(known) < 2 * MIN_LOSSES:
        return
    latest = statistics.median(known[-MIN_LOSSES:])
    windows = range(0, len(known) - 2 * MIN_LOSSES + 1, MIN_LOSSES)
    lowest = min(statistics.median(known[at : at + MIN_LOSSES]) for at in windows)
    if lowest > 0 and latest > chosen.loss_factor * lowest:
        yield "loss", "", f"the loss rises: {latest:.4g} now, {lowest:.4g} at its lowest"


def _of_devices(state: WatchedRun, chosen: AlertSettings) -> Iterator[tuple[str, str, str]]:
    for device in state.devices:
        if device.is_connected or device.last_seen is None or device.last_round is None:
            continue
        if device.refusal_code == CertificateRevoked.__name__:  # the operator sent it away
            continue
        away = state.now - device.last_seen
        if away >= chosen.lost_seconds:
            yield "device-lost", device.name, f"{device.name} is away for {duration_text(away)}"


def _of_machine(state: WatchedRun, chosen: AlertSettings) -> Iterator[tuple[str, str, str]]:
    for name, ends_at in state.certificates.items():
        left = ends_at - state.now
        if left <= 0:
            yield "certificate", name, f"the certificate of {name} has ended"
        elif left <= chosen.certificate_seconds:
            yield "certificate", name, f"the certificate of {name} ends in {duration_text(left)}"
    if state.free_bytes is not None and state.free_bytes < chosen.free_bytes:
        free = bytes_text(state.free_bytes)
        yield "disk", state.folder, f"{free} are left on the disk of {state.folder}"
