"""Token buckets per address and per stream, and the address range of a subscriber."""

from __future__ import annotations

from headwater.common.transport.limits import MAX_REPLY_HEAD_BYTES
from headwater.server.transport.rate_limit import (
    BURST,
    FRAMES,
    FRAMES_PER_INSTRUCTION,
    MAX_ADDRESSES,
    PER_SECOND,
    UNASKED_BYTES,
    UNASKED_BYTES_PER_SECOND,
    FrameLimit,
    RateLimit,
    subscriber,
)


def test_the_rate_limit_recovers_with_time_and_forgets_addresses() -> None:
    limit = RateLimit()
    assert [limit.take("a", 0.0) for _ in range(int(BURST) + 1)] == [True] * int(BURST) + [False]
    assert limit.take("b", 0.0)
    assert limit.take("a", 1 / PER_SECOND)
    assert not limit.take("a", 1 / PER_SECOND)
    for number in range(MAX_ADDRESSES):
        limit.take(str(number), 3.0)
    assert limit.take("a", 3.0)


def test_capacity_is_checked_without_taking_a_token() -> None:
    limit = RateLimit()
    for _ in range(int(BURST)):
        assert limit.has_capacity("a", 0.0)
        limit.take("a", 0.0)
    assert not limit.has_capacity("a", 0.0)
    assert limit.has_capacity("a", 1 / PER_SECOND)


def test_an_ipv6_subscriber_is_its_64_bit_prefix() -> None:
    assert subscriber("2001:db8:1:2:3:4:5:6") == subscriber("2001:db8:1:2::1")
    assert subscriber("2001:db8:1:2::1") != subscriber("2001:db8:1:3::1")
    assert subscriber("192.0.2.1") != subscriber("192.0.2.2")


def test_an_honest_stream_has_frames_to_spare() -> None:
    frames, now = FrameLimit(at=0.0), 0.0
    for _ in range(10_000):  # rounds at full speed, of a description, a reply and three chunks
        frames.grant_reply(3 << 20)
        assert all(frames.take(now) for _ in range(5))
    assert frames.tokens <= FRAMES + FRAMES_PER_INSTRUCTION + 6
    idle = FrameLimit(at=0.0)
    assert sum(idle.take(0.0) for _ in range(5000)) == FRAMES
    assert idle.take(2.0)  # the tokens refill with time


def test_a_stream_has_few_bytes_beyond_its_replies_and_they_refill_with_time() -> None:
    frames = FrameLimit(at=0.0)
    frames.grant_reply(100 << 20)
    for _ in range(101):
        assert frames.take(0.0, num_bytes=1 << 20)
    silent = FrameLimit(at=0.0)
    assert silent.take(0.0, num_bytes=int(UNASKED_BYTES))
    assert not silent.take(0.0, num_bytes=1)
    assert silent.take(1.0, num_bytes=int(UNASKED_BYTES_PER_SECOND))
    for _ in range(1000):
        silent.grant_reply(0)
    assert silent.num_bytes <= UNASKED_BYTES + 2 * MAX_REPLY_HEAD_BYTES
