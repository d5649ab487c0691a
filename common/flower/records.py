"""Converts messages and vectors to Flower's records and arrays, and back.

Our arrays hold the raw little-endian bytes of one flat tensor. Between our own grids and apps an
array is a view of memory that it does not own, never a copy; on Flower's own grids, which
serialise, it must be ``bytes``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticSerializationError
from torch import Tensor

from headwater.common.errors import (
    ConnectionLost,
    CorruptUpdate,
    HeadwaterError,
    LateUpdate,
    SettingsError,
    error_of,
    travelling,
)
from headwater.common.messages import (
    MAX_FAULTS,
    DescribeRequest,
    Plan,
    Update,
    UpdateReport,
)
from headwater.common.parsed_text import json_of

FLAT = "headwater.flat"
HEAD, VECTOR = "head", "vector"
# Flower's error codes: the message or its reply exceeded its time to live; the node disconnected.
EXPIRED, NODE_GONE = (3, 4), 5
OWN_ERROR = 1000  # the Error.code of our errors; Flower's own codes are below 100

RUN = "run"
"""The context's entry with the run that the others are of."""
MAX_HEAD_CHARACTERS = 1 << 20
"""Of a message's data as JSON: the longest frame of the wire."""
MAX_QUOTED = 1 << 14
"""Of a longer message no value is quoted."""
SHORTER_TERMS = "send less with the plans of the feature, or simulate in one process"
MessageT = TypeVar("MessageT", bound=BaseModel)


def flat_array(data: memoryview | bytes, *, dtype: str) -> Array:
    """Wrap bytes as an array without copying them."""
    array = Array(dtype=dtype, shape=(len(data),), stype=FLAT, data=b"")
    array.data = data  # type: ignore[assignment] # a view: our grids never serialise it
    return array


def content_of(data: BaseModel, array: Array | None = None) -> RecordDict:
    """Return a message's content: its data and, optionally, a vector.

    Raises:
        SettingsError: a plan's terms are longer than a message may be.
    """
    head = json_text(data)
    if isinstance(data, Plan) and len(head) > MAX_HEAD_CHARACTERS:
        raise SettingsError(
            f"a plan of {len(head):,} characters with its terms ({', '.join(data.terms)}), and a "
            f"message has room for {MAX_HEAD_CHARACTERS:,}",
            remedy=SHORTER_TERMS,
        )
    return content_with_head(head, array)


def json_text(data: BaseModel) -> str:
    """Return a message's data as JSON; of what a server asks, without what is so by default.

    So a field that is new in this version is sent only where it says something, and a device of an
    earlier version, which knows no such field, refuses that alone. What a device answers has all
    its fields: which of them are there must not follow from its data.

    Raises:
        SettingsError: a tensor in it is longer than a message may be.
    """
    try:
        is_asked = isinstance(data, Plan | DescribeRequest)
        return data.model_dump_json(exclude_none=True, exclude_defaults=is_asked)
    except PydanticSerializationError as error:  # a tensor that says so itself
        raise SettingsError(str(error), remedy=SHORTER_TERMS) from error


def content_with_head(head: str, array: Array | None) -> RecordDict:
    """Return a message's content: its data as JSON and, optionally, a vector."""
    content = RecordDict({HEAD: ConfigRecord({"json": head})})
    if array is not None:
        record = ArrayRecord()
        record[VECTOR] = array  # the constructor would copy it through bytes
        content[VECTOR] = record
    return content


def head_json(content: RecordDict) -> str:
    """Return a message's data as JSON.

    Raises:
        CorruptUpdate: the message has no data, or more than a frame of the wire has room for.
    """
    record = content.get(HEAD)
    text = record.get("json") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str):
        raise CorruptUpdate("a message without the head that every message must have")
    if len(text) > MAX_HEAD_CHARACTERS:
        raise CorruptUpdate(
            f"a message with a head of {len(text):,} characters; at most {MAX_HEAD_CHARACTERS:,}"
        )
    return text


def read(content: RecordDict, kind: type[MessageT]) -> MessageT:
    """Parse and check a message's data.

    Raises:
        CorruptUpdate: see ``parse``.
    """
    return parse(head_json(content), kind)


def parse(text: str | bytes, kind: type[MessageT]) -> MessageT:
    """Parse JSON into ``kind`` and check every bound.

    Raises:
        CorruptUpdate: naming the first wrong field, and the value found there unless it is an
            object or a list: a reply of another kind may hold what no log may show.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        if (number := error.error_count()) > MAX_FAULTS:  # each in Python takes a kilobyte
            raise CorruptUpdate(
                f"{kind.__name__}: {number:,} faults in {len(text):,} characters"
            ) from None
        # What was found is not copied into Python if it may be long.
        is_short = len(text) <= MAX_QUOTED
        first = error.errors(include_url=False, include_context=False, include_input=is_short)[0]
        where = ".".join(str(step) for step in first["loc"]) or "json"
        # The values of a secure session's messages are never quoted, not even as the cause.
        is_whole = isinstance(first.get("input", []), dict | list)
        if is_whole or kind.model_config.get("hide_input_in_errors"):
            raise CorruptUpdate(f"{kind.__name__}.{where}: {first['msg'].lower()}") from None
        found = repr(first["input"])[:80]
        raise CorruptUpdate(
            f"{kind.__name__}.{where}: {first['msg'].lower()}, found {found}"
        ) from error


def vector(content: RecordDict) -> memoryview | bytes | None:
    """Return the vector's memory, or None if the message has none."""
    record = content.get(VECTOR)
    if not isinstance(record, ArrayRecord):
        return None
    array = record.get(VECTOR)
    return None if array is None or array.stype != FLAT else array.data


def is_view(content: RecordDict) -> bool:
    """Return whether the message came over one of our grids, which pass views."""
    return isinstance(vector(content), memoryview)


def update_content(
    update: Update, encoded: bytearray | None = None, *, as_view: bool, sums: bytes = b""
) -> RecordDict:
    """Return a reply's content with an update, or with its encoding in place of its vector.

    ``sums`` are those beside the model's. The bytes are copied only for them, or if the grid
    serialises.
    """
    is_plain = encoded is None and not sums
    memory = update.values_P.numpy().data.cast("B") if encoded is None else memoryview(encoded)
    if sums:
        memory = memoryview(bytes(memory) + sums)
    dtype = "float32" if is_plain else "uint8"
    return content_of(update.report, flat_array(memory if as_view else bytes(memory), dtype=dtype))


def read_update(
    content: RecordDict, plan: Plan | None = None, *, num_values: int | None = None
) -> Update:
    """Read an update; its vector, or its encoding, is a view of the message's memory.

    ``plan`` says how it is encoded, and ``num_values`` of how many coordinates it is.

    Raises:
        CorruptUpdate: no vector, or not a whole number of float32; or see ``Coding.read``.
        NonFiniteUpdate: see ``Coding.read``.
    """
    report = read(content, UpdateReport)
    memory, sums = vector(content), dict[str, Tensor]()
    if plan is not None and plan.terms and num_values is not None:
        asked, length = plan.extra_sums(num_values), plan.model_bytes(num_values)
        if asked.of:
            whole = memoryview(memory or b"")
            sums, memory = asked.read(whole[length:], name=report.name), whole[:length]
    coding = None if plan is None else plan.coding
    if coding is not None and num_values is not None:
        encoded = coding.read(memory or b"", report.name, num_values)
        return Update(values_P=torch.zeros(0), report=report, sums=sums, encoded=encoded)
    if memory is None or len(memory) % 4:
        raise CorruptUpdate(f"{report.name}: an update without a float32 vector")
    return Update(values_P=as_tensor(memory), report=report, sums=sums)


def as_tensor(memory: memoryview | bytes) -> Tensor:
    """View bytes as a float32 vector, which must not be written."""
    if isinstance(memory, bytes):
        memory = memoryview(bytearray(memory))
    return torch.frombuffer(memory, dtype=torch.float32) if len(memory) else torch.zeros(0)


def to_flower_error(error: BaseException, *, is_same_process: bool = False) -> Error:
    """Convert an exception to Flower's error, without text that must stay on this side.

    If both sides are in the same process, the error has the whole message.
    """
    code, message = travelling(error)
    if is_same_process and isinstance(error, HeadwaterError):
        message = error.message
    return Error(code=OWN_ERROR, reason=json.dumps([code, message]))


def error_of_reply(message: Message) -> HeadwaterError:
    """Convert an error reply to an exception."""
    reason = message.error.reason or ""
    if message.error.code == OWN_ERROR:
        try:
            code, text = json_of(reason)
        except (ValueError, TypeError):
            return HeadwaterError(reason[:500])
        return error_of(str(code), str(text))
    return HeadwaterError(f"Flower's error {message.error.code}: {reason[:500]}")


def reply_content(reply: Message) -> RecordDict:
    """Return a reply's content.

    Raises:
        LateUpdate, ConnectionLost: Flower's own error codes.
        HeadwaterError: the error that the other side sent instead of content.
    """
    if not reply.has_error():
        return reply.content
    if reply.error.code in EXPIRED:
        raise LateUpdate(f"the round's deadline passed: {reply.error.reason}")
    if reply.error.code == NODE_GONE:
        raise ConnectionLost(f"the node disconnected: {reply.error.reason}")
    raise error_of_reply(reply)


def forget_other_runs(context: Context) -> None:
    """Forget what the context has of another run: Flower hands it on within a series of runs.

    A speed that was measured under another run's settings would let plans ask for too much.
    """
    own = {"id": str(context.run_id)}
    if load_state(context, RUN) != own:
        for name in list(context.state):
            del context.state[name]
        save_state(context, RUN, own)


def save_state(context: Context, name: str, state: Any) -> None:
    """Save a dataclass, or a dict of ``load_state``, in the node's context for the run."""
    plain = state if isinstance(state, dict) else dataclasses.asdict(state)
    context.state[name] = ConfigRecord({"json": json.dumps(plain)})


def load_state(context: Context, name: str) -> dict[str, Any] | None:
    """Return the state that ``save_state`` saved, or None."""
    record = context.state.get(name)
    if not isinstance(record, ConfigRecord):
        return None
    return cast(dict[str, Any], json_of(str(record["json"])))


def save_bytes(context: Context, name: str, data: bytes) -> None:
    """Save bytes in the node's context for the run."""
    context.state[name] = ConfigRecord({"bytes": data})


def load_bytes(context: Context, name: str) -> bytes | None:
    """Return the bytes that ``save_bytes`` saved, or None."""
    record = context.state.get(name)
    data = record.get("bytes") if isinstance(record, ConfigRecord) else None
    return data if isinstance(data, bytes) else None


def delete_state(context: Context, name: str) -> bool:
    """Delete the state or bytes under a name; return whether there were any."""
    return context.state.pop(name, None) is not None


def node_identity(node_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return name, labels, data path and part from a node's configuration, ours or Flower's."""
    part = int(node_config.get("partition-id", 0))
    data = node_config.get("data")
    return {
        "name": str(node_config["name"]) if "name" in node_config else None,
        "labels": str(node_config["labels"]) if "labels" in node_config else None,
        "data": Path(str(data)) if data else None,
        "part": part,
        "num_parts": int(node_config.get("num-partitions", 1)),
        "is_partition": "partition-id" in node_config,
    }
