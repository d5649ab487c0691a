"""The table of ``headwater-client check``: where a device's memory goes, and what makes it fit.

Every number is one that training itself goes by: the bytes of the tensors, the measured peaks
(``headwater.client.memory.peak_model``), and what autograd keeps (``client.memory.footprint``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rich.filesize import decimal
from torch import Tensor, nn

from headwater.client.memory.activation_checkpointing import (
    Recomputed,
    choice_of,
    is_on,
)
from headwater.client.memory.footprint import Footprint
from headwater.client.memory.peak_model import PeakModel, guarded_bytes
from headwater.client.memory.process_limits import MemoryLimit
from headwater.client.trainer.trainer import Trainer
from headwater.common.errors import OutOfMemory
from headwater.common.secagg.masking import CHUNK_BYTES as MASK_BYTES
from headwater.common.transport.limits import CHUNK_BYTES
from headwater.common.wording import counted


class Part(NamedTuple):
    """A part of the memory, its bytes, and a note; a part of another one begins with two spaces."""

    name: str
    num_bytes: float
    note: str = ""

    @property
    def line(self) -> str:
        """The part as a line of the table."""
        return f"  {self.name:<32} {decimal(round(self.num_bytes)):>10}  {self.note}".rstrip()


def parts_at_rest(trainer: Trainer, resident_bytes: int) -> list[Part]:
    """Return what is there before any example; the parts add up to ``resident_bytes``."""
    image, vector = trainer.image, trainer.accumulator.memory
    constants = [one for _, one in image.constants()]
    frozen = [one for one in constants if isinstance(one, nn.Parameter)]
    buffers = [one for one in constants if not isinstance(one, nn.Parameter)]
    trained = [*image.trainable(), *image.local()]
    parts = [Part("parameters, trained", _bytes_of(trained), _kinds(trained))]
    if frozen:
        parts.append(Part("parameters, frozen", _bytes_of(frozen), _kinds(frozen)))
    if buffers:
        parts.append(Part("buffers", _bytes_of(buffers), _kinds(buffers)))
    parts.append(Part("update vector", vector.nbytes, "sums of gradients, float32"))
    rest = resident_bytes - sum(part.num_bytes for part in parts)
    return [Part("Python, libraries and data", rest), *parts]


def parts_of_training(
    at_rest: Iterable[Part],
    known: PeakModel,
    found: Footprint | None,
    *,
    num_tokens: int | None,
    has_algorithm: bool,
    is_masked: bool,
) -> Iterator[Part]:
    """Yield what a micro-batch of one example adds; ``num_tokens`` are those of a usual one."""
    rest, total = sum(part.num_bytes for part in at_rest), known.now.at(1)
    first = max(known.now.base - rest, 0.0)
    yield Part("a pass of any size", first, "such as a parameter's gradient before it is added")
    each = total - rest - first
    yield Part("activations, per example", each, "at the peak of the backward pass")
    if num_tokens is not None:
        yield Part("  per token", each / num_tokens, f"of {num_tokens:,} in a usual example")
    if found is not None:
        yield Part("  kept for it", found.plain, "without computing anything again")
        yield Part("  outside of blocks", found.outside, "embedding, last layer and loss")
    note = "the client algorithm's own is not counted" if has_algorithm else "it is the server's"
    yield Part("optimizer", 0, note)
    yield Part("receiving, then sending", CHUNK_BYTES, "a piece at a time, in the tensors' place")
    if is_masked:
        yield Part("masking", MASK_BYTES, "a piece at a time, in the update vector's place")
    yield Part("total at its peak", total, "with micro-batches of one example")


def rough(fitting: float) -> str:
    """Return how many examples fit, with two figures: the rest changes from look to look."""
    return counted(int(fitting) if fitting < 100 else int(float(f"{fitting:.1e}")), "example")


def what_makes_it_fit(trainer: Trainer, fitting: float) -> str:
    """Return the measures that make the task fit, and the micro-batches that then fit."""
    model, size = trainer.image.model, f"in micro-batches of up to {rough(fitting)}"
    if not is_on(model):
        return f"{size}, with no activation computed again"
    extents = [*choice_of(model).values()]
    all_of, cheap = extents.count(Recomputed.ALL), extents.count(Recomputed.CHEAP)
    return (
        f"{size}, because the backward pass computes {all_of} of {len(extents)} blocks again, and "
        f"what cheap operations gave in {cheap}"
    )


def check_fits(name: str, known: PeakModel, limit: MemoryLimit, fitting: float) -> None:
    """Check that one example fits.

    Raises:
        OutOfMemory: it does not; names how much is missing.
    """
    if fitting >= 1:
        return
    peak = known.now.at(1)
    missing = peak - guarded_bytes(limit.num_bytes, known.now.base)
    raise OutOfMemory(
        f"{name}: one example alone does not fit: its predicted peak is {decimal(round(peak))} of "
        f"{decimal(limit.num_bytes)} ({limit.origin}), of which a part is left free for errors of "
        f"the prediction: {decimal(round(missing))} are missing"
    )


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _kinds(tensors: Iterable[Tensor]) -> str:
    """Return how many numbers there are of each dtype, or of each kind of codes."""
    numbers: dict[str, int] = {}
    for tensor in tensors:
        kind = getattr(tensor, "stored_kind", str(tensor.dtype).removeprefix("torch."))
        numbers[kind] = numbers.get(kind, 0) + tensor.numel()
    return ", ".join(f"{number:,} {kind}" for kind, number in numbers.items())
