"""One device's own values of the parameters that stay on it, from round to round.

A round's local step is pending until the server says that the round's sum contains this client's
update, as is the sampler's position. So an update that was refused, lost or repeated neither loses
a step nor takes it twice.

As bytes it is a plain safetensors file: the parameters by their own names, those of a pending round
with a dot before, and the digest of the layout that they belong to.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from headwater.common.errors import ModelMismatch, StateError
from headwater.common.model.layout import ModelLayout
from headwater.common.parsed_text import json_of

# Begins the names of pending values; no parameter's name begins with a dot.
PENDING = "."


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalState:
    """The committed values [L], and those to move to if the pending round counts."""

    values_L: Tensor
    round: int | None = None
    """The last round whose step the values contain; None for the initial ones."""
    pending_round: int | None = None
    pending_L: Tensor | None = None

    def settle(self, counted_round: int | None) -> LocalState:
        """Move to the pending values if their round was counted; drop them otherwise."""
        if self.pending_L is not None and self.pending_round == counted_round:
            return LocalState(values_L=self.pending_L, round=self.pending_round)
        return LocalState(values_L=self.values_L, round=self.round)

    def pend(self, round_number: int, values_L: Tensor) -> LocalState:
        """Set the values to move to if ``round_number`` counts."""
        return LocalState(
            values_L=self.values_L,
            round=self.round,
            pending_round=round_number,
            pending_L=values_L,
        )


class LocalStore:
    """Where one client's own parameters are kept between rounds, as bytes."""

    def __init__(
        self, where: str, load: Callable[[], bytes | None], save: Callable[[bytes], None]
    ) -> None:
        """``where`` names the place in errors; ``load`` returns None if it holds nothing."""
        self.where = where
        self._load = load
        self._save = save

    def load_bytes(self) -> bytes | None:
        """Return what is stored; None if nothing is.

        Raises:
            StateError: it cannot be read.
        """
        try:
            return self._load()
        except OSError as error:
            raise StateError(f"{self.where} cannot be read: {error.strerror}") from error

    def save_bytes(self, data: bytes) -> None:
        """Replace what is stored.

        Raises:
            OSError: it cannot be written; what was stored is untouched.
        """
        self._save(data)

    def read(self, layout: ModelLayout) -> LocalState | None:
        """Return the state; None if there is none.

        Raises:
            StateError: it cannot be read, is damaged, or belongs to another model.
        """
        data = self.load_bytes()
        return None if data is None else _state(data, layout, self.where)

    def write(self, state: LocalState, layout: ModelLayout) -> None:
        """Replace the state as a whole.

        Raises:
            StateError: it could not be written; the old state is untouched.
        """
        try:
            self._save(_to_bytes(state, layout))
        except OSError as error:
            raise StateError(
                f"the parameters that stay on the device cannot be written: {error.strerror}"
            ) from error


def device_tensors(
    file: Path, *, layout_digest: str | None, rounds: int | None
) -> dict[str, Tensor]:
    """Return a device's own parameters by name, for a shared model of so many rounds.

    They contain the step of the device's last round if the model has that round. Whether an update
    counted is said with the next plan, and after the last round there is none.

    Raises:
        StateError: the file cannot be read, or is damaged.
        ModelMismatch: it belongs to a model of another layout.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise StateError(f"{file} cannot be read: {error.strerror}") from error
    stored = _read(data, str(file))
    if stored.layout_digest != layout_digest:
        raise ModelMismatch(
            f"{file} holds the own parameters of a device in a run of another model: its layout "
            f"is {stored.layout_digest:.12}, that of the model {layout_digest or 'unknown':.12}",
            remedy="name a file that a device wrote in the run of this model",
        )
    is_counted = stored.pending_round is not None and stored.pending_round <= (rounds or 0)
    return stored.pending if is_counted else stored.tensors


def _to_bytes(state: LocalState, layout: ModelLayout) -> bytes:
    from safetensors.torch import save  # most clients keep no parameters

    tensors = layout.local_tensors(state.values_L)
    if state.pending_L is not None:
        # Cloned: they are the committed values themselves where a round failed.
        pending = layout.local_tensors(state.pending_L.clone())
        tensors |= {PENDING + name: tensor for name, tensor in pending.items()}
    rounds = json.dumps({"round": state.round, "pending_round": state.pending_round})
    return save(tensors, {"layout_digest": layout.digest, "rounds": rounds})


def _state(data: bytes, layout: ModelLayout, where: str) -> LocalState:
    stored = _read(data, where)
    if stored.layout_digest != layout.digest:
        raise StateError(
            f"{where} belongs to another model, or to other --local-parameters",
            remedy="start the device as it was started before; or delete the file, and the "
            "parameters that stay on it begin anew",
        )
    return LocalState(
        values_L=layout.local_vector(stored.tensors),
        round=stored.round,
        pending_round=stored.pending_round,
        pending_L=layout.local_vector(stored.pending) if stored.pending else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stored:
    tensors: dict[str, Tensor]
    pending: dict[str, Tensor]
    layout_digest: str
    round: int | None
    pending_round: int | None


def _read(data: bytes, where: str) -> _Stored:
    from safetensors.torch import load

    try:
        header = json_of(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = header["__metadata__"]
        tensors = load(data)
        pending = [name for name in tensors if name.startswith(PENDING)]
        return _Stored(
            pending={name.removeprefix(PENDING): tensors.pop(name) for name in pending},
            tensors=tensors,
            layout_digest=metadata["layout_digest"],
            **json_of(metadata["rounds"]),
        )
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"{where} is damaged, or no file of a device: {error}",
            remedy="delete it if it is the device's: the parameters that stay on it begin anew",
        ) from error
