"""The fuzzers' inputs: streams of frames, valid and mutated.

Hypothesis draws them, so a failure shrinks to the shortest failing stream.
"""

from __future__ import annotations

import base64
import hashlib
import json
from typing import Any

from hypothesis import strategies as st

from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.plan_digest import plan_digest
from headwater.common.transport.limits import CHUNK_BYTES, PROTOCOL_VERSION
from headwater.common.transport.wire_pb2 import (
    Chunk,
    ClientFrame,
    Fault,
    Hello,
    Leave,
    Renewal,
    Reply,
)
from tests.attacks.raw import VECTOR, head_of, layout_digest
from tests.plans import plan_of

MESSAGE_ID = "instruction"
NAME = "fuzzed"
SIZES = (0, 1, 43, 44, 45, CHUNK_BYTES, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
TEXTS: tuple[str, ...] = ("", NAME, MESSAGE_ID, "x" * 129, "a\nb", "../x", "\0", "[" * 5000)
TEXTS += ('{"name": "fuzzed"}', "\x1b[2J\x9b", "[/bold]", "\u202egnp.exe")
METRICS = (
    {"[/x]": 1.0},
    {"\x1b]0;x\x07": 1.0, "\u2028": -1.0},
    {"m" * 65: 1.0},
    {str(number): 1.0 for number in range(49)},
    {"m": 1e101},
    {"m": -1e100},
)
ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([-1, 0, 2**53, 2**64, 1e308, None, True, "", [], {}, "NaN"]),
    st.floats(),
    st.text(max_size=8),
)
# After so many announcements that no instruction asks for, the stream ends.
UNASKED = 25


@st.composite
def mutated(draw: st.DrawFn, valid: st.SearchStrategy[bytes]) -> bytes:
    """Draw valid bytes, and change them in up to four places."""
    data = bytearray(draw(valid))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("flip", "cut", "insert", "repeat", "overwrite"))):
            case "flip" if place < len(data):
                data[place] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del data[place:]
            case "insert":
                data[place:place] = draw(st.binary(max_size=16))
            case "repeat":
                data[place:place] = data[place : place + draw(st.integers(1, 64))]
            case _:
                data[place : place + 9] = draw(st.binary(min_size=9, max_size=9))
    return bytes(data)


def texts() -> st.SearchStrategy[str]:
    return st.sampled_from(TEXTS) | st.text(max_size=20)


def hellos() -> st.SearchStrategy[Hello]:
    honest = Hello(protocol_version=PROTOCOL_VERSION, name=NAME, layout_digest=layout_digest())
    return st.just(honest) | st.builds(
        Hello,
        protocol_version=st.sampled_from((0, PROTOCOL_VERSION, 2**32 - 1)),
        name=texts(),
        layout_digest=st.just(layout_digest()) | texts(),
        session=st.binary(max_size=20),
        image_id=texts(),
    )


def honest_reply() -> Reply:
    return Reply(
        message_id=MESSAGE_ID,
        head_json="{}",
        num_bytes=len(VECTOR),
        sha256=hashlib.sha256(VECTOR).digest(),
    )


def replies() -> st.SearchStrategy[Reply]:
    return st.just(honest_reply()) | st.builds(
        Reply,
        message_id=st.just(MESSAGE_ID) | texts(),
        head_json=texts(),
        num_bytes=st.sampled_from(SIZES),
        sha256=st.just(hashlib.sha256(VECTOR).digest()) | st.binary(max_size=40),
    )


def chunks() -> st.SearchStrategy[Chunk]:
    places = st.sampled_from((0, 4, 20, 40, 43, 44)) | st.sampled_from(SIZES)
    right = st.tuples(st.integers(0, 44), st.integers(0, 44)).map(
        lambda ends: Chunk(
            transfer_id=MESSAGE_ID, offset=min(ends), data=VECTOR[min(ends) : max(ends)]
        )
    )
    whole = Chunk(transfer_id=MESSAGE_ID, offset=0, data=VECTOR)
    wrong = st.builds(Chunk, transfer_id=texts(), offset=places, data=st.binary(max_size=64))
    return st.just(whole) | right | wrong


def client_frames() -> st.SearchStrategy[bytes]:
    """Draw frames of a device, each valid on its own."""
    faults = st.builds(Fault, message_id=texts(), code=texts(), text=texts())
    return st.one_of(
        replies().map(lambda reply: ClientFrame(reply=reply)),
        chunks().map(lambda chunk: ClientFrame(chunk=chunk)),
        hellos().map(lambda hello: ClientFrame(hello=hello)),
        faults.map(lambda fault: ClientFrame(fault=fault)),
        st.binary(max_size=64).map(lambda data: ClientFrame(renewal=Renewal(signing_request=data))),
        st.just(ClientFrame(leave=Leave())),
        st.just(ClientFrame()),
    ).map(lambda frame: frame.SerializeToString())


def honest_heads() -> st.SearchStrategy[bytes]:
    """Draw the JSON of a head, mostly an update's, with odd values in its fields."""
    plan = json.dumps({"round": 1})
    instruction = type("Instruction", (), {"head_json": plan})
    head = json.loads(head_of(instruction, NAME))  # type: ignore[arg-type]
    changed = st.tuples(st.sampled_from(sorted(head)), ODD).map(lambda kv: head | {kv[0]: kv[1]})
    metrics = st.sampled_from(METRICS).map(lambda sums: head | {"metric_sums": sums})
    return (changed | metrics).map(lambda fields: json.dumps(fields).encode())


def secure_heads() -> st.SearchStrategy[bytes]:
    """Draw the JSON of a message of a masked, private round, with an odd value at one place."""
    return st.sampled_from(SECURE_HEADS).flatmap(
        lambda head: st.tuples(st.sampled_from(_places(head)), ODD).map(
            lambda change: json.dumps(_with_value(head, *change)).encode()
        )
    )


def _places(head: Any) -> list[tuple[str | int, ...]]:
    """Return the path of each value in a JSON document."""
    items = head.items() if isinstance(head, dict) else enumerate(head)
    found: list[tuple[str | int, ...]] = []
    for key, value in items:
        found.append((key,))
        if isinstance(value, dict | list):
            found += [(key, *rest) for rest in _places(value)]
    return found


def _with_value(head: Any, place: tuple[str | int, ...], value: Any) -> Any:
    """Return a copy of a JSON document with another value at a path."""
    key, *rest = place
    copied: Any = dict(head) if isinstance(head, dict) else list(head)
    copied[key] = _with_value(head[key], tuple(rest), value) if rest else value
    return copied


_KEY = base64.b64encode(bytes(range(32))).decode()
_SEALED = base64.b64encode(bytes(92)).decode()
_SHARE = base64.b64encode(bytes(16)).decode()
_PLAN = plan_of(
    round=3,
    run_seed=5,
    model_version=2,
    quota=64,
    micro_batch_size=8,
    answer_seconds=2.5,
    is_masked=True,
    privacy=PrivacyTerms(norm_bound=64.0, noise_multiplier=1.5, min_survivors=0.7, corrupted=0.1),
)
_MEMBER = {"name": NAME, "mask_key": _KEY, "sharing_key": _KEY, "planned_weight": 64}
_SESSION = {"run": 7, "round": 3, "attempt": 1, "mode": "active"}
_PARAMETERS = {
    **_SESSION,
    "plan": base64.b64encode(plan_digest(_PLAN, "")).decode(),
    "threshold": 2,
    "num_values": 70,
    "encoding": {"ring_bits": 32, "scale_bits": 12, "clip": 16.0, "max_weight": 192},
    "scalars": [
        {"name": "weight", "is_count": True, "bound": 64, "num_devices": 3, "scale_bits": 0}
    ],
}
_DEALT = {"dealer": NAME, "holder": "other", "sealed": _SEALED}
_DEALT |= {"key_commitment": _SHARE, "seed_commitment": _SHARE}
SECURE_HEADS: tuple[dict[str, Any], ...] = (
    json.loads(_PLAN.model_dump_json()),
    {"name": NAME, "round": 3, "vitals": {"battery": 0.5, "share": 1.0}},
    _SESSION,
    {"name": NAME, "mask_key": _KEY, "sharing_key": _KEY, "has_aes": True},
    {"parameters": _PARAMETERS, "members": [_MEMBER, {**_MEMBER, "name": "other"}]},
    {"name": NAME, "session": _KEY, "seed_commitment": _SHARE, "shares": [_DEALT]},
    {"shares": [_DEALT, _DEALT]},
    {"name": NAME, "bad_dealers": ["other"]},
    {"members": [NAME, "other"]},
    {"name": NAME, "session": _KEY, "scalars": _SHARE},
    {"survived": [NAME], "dropped": ["other"], "signatures": {}},
    {"name": NAME, "self_seed_shares": {"other": _KEY}, "mask_key_shares": {}},
)
"""One message of each kind, as its JSON."""


def honest_script() -> list[bytes | None]:
    """Return an honest stream; None marks where the server sends an instruction."""
    hello = Hello(protocol_version=PROTOCOL_VERSION, name=NAME, layout_digest=layout_digest())
    parts = [
        Chunk(transfer_id=MESSAGE_ID, offset=offset, data=VECTOR[offset : offset + 20])
        for offset in range(0, len(VECTOR), 20)
    ]
    frames = [
        ClientFrame(hello=hello),
        ClientFrame(reply=honest_reply()),
        *(ClientFrame(chunk=part) for part in parts),
        ClientFrame(leave=Leave()),
    ]
    hello_frame, *rest = (frame.SerializeToString() for frame in frames)
    return [hello_frame, None, *rest]


@st.composite
def scripts(draw: st.DrawFn) -> list[bytes | None]:
    """Draw an honest stream with up to four wrong frames."""
    script = honest_script()
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, len(script)))
        here = script[place] if place < len(script) else None
        match draw(
            st.sampled_from(("drop", "repeat", "swap", "mutate", "insert", "ask", "unasked"))
        ):
            case "drop":
                del script[place : place + 1]
            case "repeat":
                script.insert(draw(st.integers(0, len(script))), here)
            case "swap" if place + 1 < len(script):
                script[place], script[place + 1] = script[place + 1], here
            case "mutate" if here is not None:
                script[place] = draw(mutated(st.just(here)))
            case "ask":
                script.insert(place, None)
            case "unasked":
                reply = Reply(message_id=draw(texts()), num_bytes=draw(st.sampled_from(SIZES)))
                script[place:place] = [ClientFrame(reply=reply).SerializeToString()] * UNASKED
            case _:
                script.insert(place, draw(client_frames()))
    return script
