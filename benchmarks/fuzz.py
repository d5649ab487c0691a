"""Fuzzing: bytes and frames that nobody should send, for as many minutes as one likes.

``decode`` gives mutated frames and heads to each decoder of bytes that come from the other side,
``conversations`` plays streams in which up to four frames are not as they should be to the real
servicer, and ``wire`` sends mutated bytes of a whole connection, HTTP/2 and all, to its port. What
must hold is in ``tests/attacks/fuzz_targets.py``. A breach ends the run with the shortest input
that hypothesis finds for it. A short form runs with the tests, with the same inputs each time.

``executions`` are inputs, ``rss_grown_bytes`` is the memory of this process at the end less that
after the first tenth, ``lines`` the share of the lines of each file that the first inputs reach.
"""

from __future__ import annotations

import asyncio
import dis
import logging
import threading
import time
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from benchmarks.measure import ROOT, Figures, arguments, memory_of, num_descriptors, report
from tests.attacks.fuzz_inputs import client_frames, honest_heads, mutated, scripts, secure_heads
from tests.attacks.fuzz_targets import Conversations, decode
from tests.attacks.socket_bytes import is_served, record, send_bytes

MINUTES = 10.0
BATCH = 300
TRACED_FILES = (
    "server/transport/admission.py",
    "server/transport/servicer.py",
    "server/transport/staging.py",
    "server/transport/stream.py",
    "server/transport/uploads.py",
)


class Fuzzer:
    """Draws and plays batches of inputs, each batch from a seed of its own."""

    def __init__(self, conversations: Conversations) -> None:
        self.executions: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()
        self._conversations = conversations
        self._recorded = asyncio.run(record(conversations.servicer.port))

    def batch(self, number: int, examples: int = BATCH) -> None:
        """Play a batch of each kind."""
        frames = mutated(client_frames()) | honest_heads() | mutated(honest_heads())
        frames |= secure_heads() | mutated(secure_heads())
        self._play(number, examples, "decode", frames, self._decode)
        self._play(number, examples, "conversations", scripts(), self._conversations.play)
        drawn: list[bytes] = []
        self._play(number, examples // 10, "wire", mutated(st.just(self._recorded)), drawn.append)
        asyncio.run(self._send(drawn))

    def _play(
        self,
        number: int,
        examples: int,
        kind: str,
        strategy: st.SearchStrategy[Any],
        play: Callable[[Any], None],
    ) -> None:
        @seed(number)
        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(drawn=strategy)
        def one(drawn: Any) -> None:
            self.executions[kind] += 1
            play(drawn)

        one()

    def _decode(self, data: bytes) -> None:
        self.taken.update(decode(data))

    async def _send(self, drawn: list[bytes]) -> None:
        port = self._conversations.servicer.port
        for data in drawn:
            await send_bytes(port, data)
        if not await is_served(port):
            raise AssertionError("an honest device is not served any more")


@contextmanager
def traced_lines() -> Iterator[dict[str, set[int]]]:
    """Note which lines of the traced files are reached by threads that start in here."""
    reached: dict[str, set[int]] = defaultdict(set)
    paths = {str(ROOT / "headwater" / name): name for name in TRACED_FILES}

    def trace(frame: types.FrameType, event: str, _: Any) -> Any:
        name = paths.get(frame.f_code.co_filename)
        if name is None:
            return None
        if event == "line":
            reached[name].add(frame.f_lineno)
        return trace

    threading.settrace(trace)
    try:
        yield reached
    finally:
        threading.settrace(None)


def lines_of(path: Path) -> set[int]:
    """Return the lines of a file's functions, without those that define them."""
    found: set[int] = set()
    to_see = [compile(path.read_text(), str(path), "exec")]
    while to_see:
        code = to_see.pop()
        inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
        to_see += inner
        if code.co_flags & 0x2 and code.co_name != "<lambda>":  # optimised: a function's
            found |= {
                line for _, line in dis.findlinestarts(code) if line and line != code.co_firstlineno
            }
    return found


def coverage(examples: int) -> Figures:
    """Return the share of lines that a batch reaches."""
    with traced_lines() as reached, Conversations() as conversations:
        Fuzzer(conversations).batch(0, examples)
    shares = {}
    for name in TRACED_FILES:
        lines = lines_of(ROOT / name)
        shares[name] = len(reached[name] & lines) / len(lines)
    return shares


def fuzz(minutes: float) -> Figures:
    """Fuzz for so long, and return what was done."""
    with Conversations() as conversations:
        fuzzer = Fuzzer(conversations)
        begun, end = time.monotonic(), time.monotonic() + 60 * minutes
        settled: int | None = None
        number = 1
        while (now := time.monotonic()) < end:
            if settled is None and now > begun + 6 * minutes:
                settled = memory_of()["VmRSS"]
            fuzzer.batch(number)
            number += 1
        rss = memory_of()["VmRSS"]
        return {
            "minutes": (time.monotonic() - begun) / 60,
            "executions": dict(fuzzer.executions),
            "frames": conversations.num_frames,
            "endings": dict(conversations.endings.most_common()),
            "decoded": dict(fuzzer.taken.most_common()),
            "findings": 0,
            "rss_grown_bytes": rss - (settled or rss),
            "descriptors": num_descriptors(),
        }


def main() -> None:
    flags = arguments(__doc__, minutes=MINUTES)
    logging.disable(logging.WARNING)  # a line for each refusal
    figures = {"lines": coverage(30 if flags.quick else 200)}
    figures |= fuzz(0.02 if flags.quick else flags.minutes)
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
