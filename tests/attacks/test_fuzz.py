"""A short, deterministic form of ``benchmarks/fuzz.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.attacks.fuzz_inputs import (
    SECURE_HEADS,
    client_frames,
    honest_heads,
    mutated,
    scripts,
    secure_heads,
)
from tests.attacks.fuzz_targets import Conversations, decode
from tests.attacks.socket_bytes import is_served, record, send_bytes

SHORT = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}

REACHED = {
    "taken",
    "CorruptUpdate",
    "ProtocolMismatch",
}


@pytest.fixture(scope="module")
def conversations() -> Iterator[Conversations]:
    with Conversations() as servicer:
        yield servicer


@pytest.mark.slow
@settings(max_examples=150, **SHORT)  # type: ignore[arg-type]
@given(
    data=mutated(client_frames())
    | honest_heads()
    | mutated(honest_heads())
    | secure_heads()
    | mutated(secure_heads())
)
def test_a_decoder_returns_a_value_or_raises_its_own_error(data: bytes) -> None:
    decode(data)


@pytest.mark.slow
def test_no_stream_leaves_memory_allocated_or_a_false_update_accepted(
    conversations: Conversations,
) -> None:
    @settings(max_examples=120, **SHORT)  # type: ignore[arg-type]
    @given(script=scripts())
    def play(script: list[bytes | None]) -> None:
        conversations.play(script)

    play()
    # A refused connection would exercise no later code.
    assert conversations.endings.keys() >= REACHED


async def test_mutated_connections_leave_the_server_serving(conversations: Conversations) -> None:
    port = conversations.servicer.port
    recorded = await record(port)

    @settings(max_examples=30, **SHORT)  # type: ignore[arg-type]
    @given(data=mutated(st.just(recorded)))
    def draw(data: bytes) -> None:
        drawn.append(data)

    drawn: list[bytes] = []
    draw()
    for data in drawn:
        await send_bytes(port, data)
    assert await is_served(port)


def test_the_fuzzed_messages_of_masked_private_rounds_are_valid_before_they_are_changed() -> None:
    kinds = [set(decode(json.dumps(head).encode())) for head in SECURE_HEADS]
    assert all(kinds)
    assert set().union(*kinds) >= {"Plan", "Roster", "SharesReply", "MaskReply", "UnmaskReply"}
