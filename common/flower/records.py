"""The bridge to Flower: plain data to records and back, and vectors to arrays and back.

An array of ours holds the raw little-endian bytes of one flat tensor. Between our own grids and
apps it is a view of memory that somebody else owns, never a copy; on Flower's own grids, which
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
from torch import Tensor

from headwater.common.errors import (
    ConnectionLost,
    CorruptUpdate,
    HeadwaterError,
    LateUpdate,
    error_of,
    travelling,
)
from headwater.common.messages import Update, UpdateReport

FLAT = "headwater.flat"
HEAD, VECTOR = "head", "vector"
# Of Flower's error codes: the message or its reply outlived its time to live; the node has gone.
EXPIRED, NODE_GONE = (3, 4), 5
REFUSED = 1000  # Error.code of an error of ours; Flower's own codes are below 100

Told = TypeVar("Told", bound=BaseModel)


def flat_array(data: memoryview | bytes, *, dtype: str) -> Array:
    """Wrap bytes as an array without copying them."""
    array = Array(dtype=dtype, shape=(len(data),), stype=FLAT, data=b"")
    array.data = data  # type: ignore[assignment] # a view: our grids never serialise it
    return array


def content_of(told: BaseModel, array: Array | None = None) -> RecordDict:
    """Put plain data, and a vector if there is one, into the content of a message."""
    return content_with_head(told.model_dump_json(exclude_none=True), array)


def content_with_head(head: str, array: Array | None) -> RecordDict:
    """Put a head that is JSON already, and a vector if there is one, into a message's content."""
    content = RecordDict({HEAD: ConfigRecord({"json": head})})
    if array is not None:
        record = ArrayRecord()
        record[VECTOR] = array  # the constructor would copy it through bytes
        content[VECTOR] = record
    return content


def head_json(content: RecordDict) -> str:
    """Return the plain data of a message, as JSON.

    Raises:
        CorruptUpdate: the message has none.
    """
    record = content.get(HEAD)
    text = record.get("json") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str):
        raise CorruptUpdate("a message without the head that every message of ours has")
    return text


def read(content: RecordDict, kind: type[Told]) -> Told:
    """Read and check the plain data of a message.

    Raises:
        CorruptUpdate: it is not what it should be.
    """
    return parse(head_json(content), kind)


def parse(text: str | bytes, kind: type[Told]) -> Told:
    """Parse JSON into ``kind`` and check every bound.

    Raises:
        CorruptUpdate: naming the first field that is wrong, and what was found there.
    """
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"]) or "json"
        # What a secure session's messages hold is quoted nowhere, not even as the cause.
        if kind.model_config.get("hide_input_in_errors"):
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


def dtype_of(content: RecordDict) -> str:
    """Return the element type of a message's vector, as its array names it."""
    record = content[VECTOR]
    assert isinstance(record, ArrayRecord)  # there is a vector
    return record[VECTOR].dtype


def is_view(content: RecordDict) -> bool:
    """Tell whether the message came over a grid of ours, which passes views."""
    return isinstance(vector(content), memoryview)


def update_content(update: Update, *, as_view: bool) -> RecordDict:
    """Put an update into the content of a reply; a copy only where the grid serialises."""
    memory = update.values_P.numpy().data.cast("B")
    array = flat_array(memory if as_view else bytes(memory), dtype="float32")
    return content_of(update.report, array)


def read_update(content: RecordDict) -> Update:
    """Read an update; its vector is a view of the message's memory.

    Raises:
        CorruptUpdate: no vector, or not a whole number of float32.
    """
    report = read(content, UpdateReport)
    memory = vector(content)
    if memory is None or len(memory) % 4:
        raise CorruptUpdate(f"{report.name}: an update without a float32 vector")
    return Update(values_P=as_tensor(memory), report=report)


def as_tensor(memory: memoryview | bytes) -> Tensor:
    """View bytes as a float32 vector. It is for reading only."""
    if isinstance(memory, bytes):
        memory = memoryview(bytearray(memory))
    return torch.frombuffer(memory, dtype=torch.float32) if len(memory) else torch.zeros(0)


def refusal(error: BaseException, *, stays_here: bool = False) -> Error:
    """Turn an exception into Flower's error; only what may be shown to the other side goes in.

    Where both sides are one process there is no other side, and the whole message goes in.
    """
    code, message = travelling(error)
    if stays_here and isinstance(error, HeadwaterError):
        message = error.message
    return Error(code=REFUSED, reason=json.dumps([code, message]))


def refused(message: Message) -> HeadwaterError:
    """Turn an error reply back into an exception."""
    reason = message.error.reason or ""
    if message.error.code == REFUSED:
        try:
            code, text = json.loads(reason)
        except (ValueError, TypeError):
            return HeadwaterError(reason[:500])
        return error_of(str(code), str(text))
    return HeadwaterError(f"Flower's error {message.error.code}: {reason[:500]}")


def answered(reply: Message) -> RecordDict:
    """Return a reply's content.

    Raises:
        LateUpdate, ConnectionLost: Flower says so.
        HeadwaterError: the error that the other side sent instead.
    """
    if not reply.has_error():
        return reply.content
    if reply.error.code in EXPIRED:
        raise LateUpdate(f"the round's deadline passed: {reply.error.reason}")
    if reply.error.code == NODE_GONE:
        raise ConnectionLost(f"the node has gone: {reply.error.reason}")
    raise refused(reply)


def keep(context: Context, name: str, state: Any) -> None:
    """Keep a frozen dataclass, or what ``kept`` gave of it, in the node's context for the run."""
    plain = state if isinstance(state, dict) else dataclasses.asdict(state)
    context.state[name] = ConfigRecord({"json": json.dumps(plain)})


def kept(context: Context, name: str) -> dict[str, Any] | None:
    """Return what ``keep`` kept, or None."""
    record = context.state.get(name)
    if not isinstance(record, ConfigRecord):
        return None
    return cast(dict[str, Any], json.loads(str(record["json"])))


def keep_bytes(context: Context, name: str, data: bytes) -> None:
    """Keep bytes in the node's context for the run."""
    context.state[name] = ConfigRecord({"bytes": data})


def kept_bytes(context: Context, name: str) -> bytes | None:
    """Return what ``keep_bytes`` kept, or None."""
    record = context.state.get(name)
    data = record.get("bytes") if isinstance(record, ConfigRecord) else None
    return data if isinstance(data, bytes) else None


def forget(context: Context, name: str) -> bool:
    """Remove what was kept under a name; say whether there was anything."""
    return context.state.pop(name, None) is not None


def node_identity(node_config: Mapping[str, Any]) -> dict[str, Any]:
    """Read name, data path and part from a node's configuration, ours or Flower's."""
    part = int(node_config.get("partition-id", 0))
    data = node_config.get("data")
    return {
        "name": str(node_config["name"]) if "name" in node_config else None,
        "data": Path(str(data)) if data else None,
        "part": part,
        "num_parts": int(node_config.get("num-partitions", 1)),
        "is_partition": "partition-id" in node_config,
    }
