"""The content of a Flower reply with a sum of gradients, and the tag that says what it is.

The tag is a ConfigRecord beside the arrays and the metrics. It holds the model's layout, the weight
that the gradients were summed over, and a checksum of the arrays, so that the server recognises a
reply that ``GradientSum`` did not make, and one that a mod or a wrapper changed on its way. The
checksum finds mistakes; it does not stop a client that lies.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from headwater.common.errors import CorruptUpdate, CountOutOfRange, ProtocolMismatch

TAG = "headwater.gradient_sum"
VERSION = 1
MAX_WEIGHT = 2**53  # the largest count that a float, Flower's metric type, holds exactly


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientTag:
    """What a reply's arrays are."""

    layout: str
    """The digest of the client's ``ModelLayout``."""
    weight: int
    num_passes: int
    """Calls of ``GradientSum.backward``, one for each batch."""
    is_reduction_seen: bool
    """Whether every loss ended in a sum that autograd's graph showed."""
    checksum: int
    unused: tuple[int, ...] = ()
    """The places of the trained parameters that no backward pass has reached."""
    is_difference: bool = False
    """Whether the arrays are weight x (parameters before - after) of local steps."""


def reply_content(
    arrays: ArrayRecord,
    metrics: MetricRecord,
    *,
    layout: str,
    weight: int,
    num_passes: int,
    is_reduction_seen: bool,
    unused: Sequence[int] = (),
    is_difference: bool = False,
) -> RecordDict:
    """Return a reply's content: the arrays, the metrics and their tag."""
    tag = ConfigRecord(
        {
            "version": VERSION,
            "layout": layout,
            "weight": weight,
            "num-passes": num_passes,
            "is-reduction-seen": is_reduction_seen,
            "is-difference": is_difference,
            "checksum": checksum(arrays),
            **({"unused": list(unused)} if unused else {}),
        }
    )
    return RecordDict({"arrays": arrays, "metrics": metrics, TAG: tag})


def read_tag(content: RecordDict, name: str) -> GradientTag | None:
    """Return a reply's tag, or None if it has none.

    Raises:
        ProtocolMismatch: the tag is of another version.
        CorruptUpdate: one of its fields is missing or of another type.
        CountOutOfRange: the weight is not from 0, or the number of passes from 1, to 2^53.
    """
    record = content.config_records.get(TAG)
    if record is None:
        return None
    if record.get("version") != VERSION:
        raise ProtocolMismatch(
            f"{name}: the reply's tag has the version {record.get('version')!r:.20}, this server "
            f"reads version {VERSION}"
        )
    layout, weight, num_passes = (
        record.get("layout"),
        record.get("weight"),
        record.get("num-passes"),
    )
    is_seen, crc = record.get("is-reduction-seen"), record.get("checksum")
    is_difference = record.get("is-difference", False)
    are_flags = isinstance(is_seen, bool) and isinstance(is_difference, bool)
    if not (isinstance(layout, str) and are_flags and isinstance(crc, int)):
        raise CorruptUpdate(f"{name}: the reply's tag has a field of another type")
    for key, count, least in (("weight", weight, 0), ("num-passes", num_passes, 1)):
        if not isinstance(count, int) or not least <= count <= MAX_WEIGHT:
            raise CountOutOfRange(
                f"{name}: the tag's {key} must be a whole number from {least} to 2^53, found "
                f"{count!r:.40}"
            )
    assert isinstance(weight, int)
    assert isinstance(num_passes, int)
    assert isinstance(is_seen, bool)
    assert isinstance(is_difference, bool)
    unused = record.get("unused", [])
    if not isinstance(unused, list) or not all(type(at) is int and at >= 0 for at in unused):
        raise CorruptUpdate(f"{name}: the reply's tag has a field of another type")
    return GradientTag(
        layout=layout,
        weight=weight,
        num_passes=num_passes,
        is_reduction_seen=is_seen,
        checksum=crc,
        unused=tuple(at for at in unused if type(at) is int),
        is_difference=is_difference,
    )


def checksum(arrays: ArrayRecord) -> int:
    """Return the CRC-32 of the arrays' names and bytes, in the order of the names."""
    crc = 0
    for name in sorted(arrays):
        crc = zlib.crc32(arrays[name].data, zlib.crc32(name.encode(), crc))
    return crc
