"""Reads the replies of ``GradientSum`` and refuses, by name, every other reply.

A reply is refused as a whole before anything of it is added. A hostile client can send any finite
sums and weight. Only a reply's length decides how much memory is allocated.
"""

from __future__ import annotations

import logging
import math
import re

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord
from numpy.typing import NDArray

from headwater.common.errors import (
    CorruptUpdate,
    CountsDisagree,
    HeadwaterError,
    ModelMismatch,
    OtherReplies,
    ReplyChanged,
    UntaggedReply,
    UpdateRefused,
    WeightsSent,
    error_of,
)
from headwater.common.flower.gradient_reply import GradientTag, checksum, read_tag
from headwater.common.model.layout import Slot
from headwater.common.model.parameters import ModelImage

log = logging.getLogger("flwr.headwater")  # Flower shows what its own logger's children say

ALIKE = 0.5  # a gradient has no reason to lie within 60 degrees of the parameters
MAX_REASON = 500  # characters at the end of another error of a client, which are logged
# SuperNodes send "<class 'NAME'>:<'TEXT'>", Ray a traceback with a line "NAME: TEXT".
OUR_ERROR = re.compile(r"headwater\.common\.errors\.(\w+)(?:'>:<'|: )([^\n]*?)(?:'>)?(?:\n|$)")


class ReplyReader:
    """Checks replies against one model, and copies their sums into ``values_P``."""

    def __init__(
        self, image: ModelImage, weight_key: str, *, are_differences: bool = False
    ) -> None:
        """``are_differences`` says that clients train locally, and send ``ModelDifference``."""
        self._are_differences = are_differences
        self.values_P = torch.zeros(image.layout.num_parameters)
        """The sums of the reply that was read last."""
        self._image = image
        self._weight_key = weight_key
        self._has_warned = False

    def read(self, reply: Message, name: str) -> tuple[MetricRecord, GradientTag]:
        """Copy a reply's sums into ``values_P``; return its metrics and its tag.

        Raises:
            UpdateRefused: the client failed, or the reply is malformed.
            UntaggedReply, WeightsSent: ``GradientSum.reply`` did not make it.
            OtherReplies: it has a difference of parameters where sums are due, or the reverse.
            ReplyChanged: a mod or a wrapper changed its arrays.
            CountsDisagree: the metrics have another count than the tag.
            ModelMismatch, ProtocolMismatch: the client has another model or version.
            HeadwaterError: the error of ours that the client raised.
        """
        if reply.has_error():
            raise _error_of_client(reply.error.reason or "", name)
        arrays, metrics = reply.content.array_records, reply.content.metric_records
        if len(arrays) != 1 or len(metrics) != 1:
            raise CorruptUpdate(
                f"{name}: expected one ArrayRecord and one MetricRecord, found {len(arrays)} and "
                f"{len(metrics)}"
            )
        ((array_record,), (metric_record,)) = arrays.values(), metrics.values()
        tag = read_tag(reply.content, name)
        if tag is None:
            raise self._untagged(array_record, name)
        if tag.is_difference != self._are_differences:
            kinds = {True: "a difference of parameters", False: "sums of gradients"}
            raise OtherReplies(
                f"{name}: expected {kinds[self._are_differences]}, found {kinds[tag.is_difference]}"
            )
        self._check_layout(tag, array_record, name)
        self._copy(array_record, name)
        if checksum(array_record) != tag.checksum:
            raise ReplyChanged(
                f"{name}: expected the sums that sums.reply tagged, found other values"
                f"{self._likeness(' (near the model itself, cosine {:.3f}, as after clipping)')}"
            )
        self._check_metrics(metric_record, tag, name)
        if not tag.is_reduction_seen and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s: its loss ends in no sum that autograd's graph shows, so a mean left in would "
                "go unnoticed: see docs/flower.md",
                name,
            )
        return metric_record, tag

    def _untagged(self, arrays: ArrayRecord, name: str) -> HeadwaterError:
        """Return the error that says what an untagged reply has."""
        expected = f"{name}: expected sums of gradients that sums.reply(message, metrics) tagged"
        trainable = {slot.name for slot in self._image.layout.trainable}
        frozen = {slot.name for slot in self._image.layout.frozen}
        if trainable <= arrays.keys():
            if frozen & arrays.keys():
                return WeightsSent(f"{expected}, found a state_dict with buffers in it")
            try:
                self._copy(arrays, name)
            except CorruptUpdate as error:
                log.debug("%s", error)
            else:
                if alike := self._likeness("the cosine to the parameters that were sent is {:.3f}"):
                    return WeightsSent(f"{expected}, found the model's parameters: {alike}")
        return UntaggedReply(f"{expected}, found {len(arrays)} arrays without a tag")

    def _likeness(self, text: str) -> str:
        """Return the text with the cosine between sums and parameters, or "" if it is small."""
        return text.format(cosine) if (cosine := self._cosine()) > ALIKE else ""

    def _cosine(self) -> float:
        here, there = self.values_P.double(), self._image.values_P.double()
        norms = float(here.norm() * there.norm())
        return float(here @ there) / norms if norms > 0 and math.isfinite(norms) else 0.0

    def _check_layout(self, tag: GradientTag, arrays: ArrayRecord, name: str) -> None:
        layout = self._image.layout
        names = {slot.name for slot in layout.trainable}
        if other := sorted(arrays.keys() ^ names):
            missing = ", ".join(it for it in other if it in names)
            raise ModelMismatch(
                f"{name}: expected sums of the {len(names)} parameters that train on the server, "
                f"found {len(arrays)}, without: {missing[:200] or 'none'}; first difference: "
                f"{other[0]}",
                remedy="build the same model on both sides, and freeze the same layers",
            )
        if tag.layout != layout.digest:
            raise ModelMismatch(
                f"{name}: expected the model's layout {layout.digest[:8]}, found {tag.layout:.8}: "
                f"a shape, a frozen layer or a buffer differs",
                remedy="build the same model on both sides, and freeze the same layers",
            )

    def _copy(self, arrays: ArrayRecord, name: str) -> None:
        """Copy a reply's arrays into the flat vector."""
        values: NDArray[np.float32] = self.values_P.numpy()
        layout = self._image.layout
        for slot, (start, end) in zip(layout.trainable, layout.spans, strict=True):
            values[start:end] = _float32_of(arrays[slot.name], slot, name)

    def _check_metrics(self, metrics: MetricRecord, tag: GradientTag, name: str) -> None:
        for metric, value in metrics.items():
            if isinstance(value, list) or not math.isfinite(value):
                raise CorruptUpdate(
                    f"{name}: the metric {metric} must be finite, found {value!r:.80}"
                )
        count = metrics.get(self._weight_key)
        if count is None or count == tag.weight:
            return
        reason = ""
        if count == tag.num_passes:
            reason = ": the number of batches, as len(trainloader) counts them"
        elif isinstance(count, int) and count > 0 and tag.weight % count == 0:
            reason = f": the loop went over the examples {tag.weight // count} times"
        raise CountsDisagree(
            f"{name}: expected {self._weight_key} = {tag.weight}, which sums.backward counted in "
            f"{tag.num_passes} batches, found {count}{reason}"
        )


def _error_of_client(reason: str, name: str) -> HeadwaterError:
    """Return the error that a client raised, by its own name if it is one of ours."""
    failed = f"{name}: the client failed"
    ours = OUR_ERROR.search(reason)
    if ours is None:
        return UpdateRefused(f"{failed}: {reason.strip()[-MAX_REASON:]}")
    error = error_of(ours[1], f"{failed}: {ours[2]}")
    error.remedy = ""  # the client's text has it
    return error


def _float32_of(array: Array, slot: Slot, name: str) -> NDArray[np.float32]:
    """Return an array's elements [n], as a view of its bytes.

    The header of ``numpy.save`` is compared, not parsed, so that a reply cannot decide what is
    allocated or evaluated.

    Raises:
        CorruptUpdate: it is not float32 of the parameter's shape in C order.
    """
    start = 10 + int.from_bytes(array.data[8:10], "little")
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {slot.shape!r}, }}"
    fits = (
        array.data[:8] == b"\x93NUMPY\x01\x00"
        and array.data[10:start].strip() == header.encode()
        and len(array.data) - start == 4 * slot.num_elements
    )
    if not fits:
        raise CorruptUpdate(
            f"{name}: {slot.name} must be float32 {slot.shape} in C order, found {array.dtype} "
            f"{array.shape} in {len(array.data):,} bytes"
        )
    return np.frombuffer(array.data, dtype="<f4", offset=start)
