"""All scenarios: links and deaths here, what is done from outside in ``event_scenarios``.

``is_short`` marks those that the tests run; ``python -m benchmarks.chaos`` runs them all.
"""

from __future__ import annotations

from collections.abc import Iterator

from tests.chaos.deaths import POINTS
from tests.chaos.event_scenarios import event_scenarios
from tests.chaos.scenario import LARGE, NARROW, SMALL, Scenario
from tests.faults import FaultPlan

# Messages up: hello, the answer to "describe", the update's head, its chunks of 1 MiB.
HEAD, SECOND_CHUNK = 3, 5
# Messages down: welcome, "describe", two receipts, the model's head, its chunks.
MODEL_CHUNK = 7
NONE = FaultPlan()

CALM = (
    Scenario(name="nothing goes wrong", plan=NONE),
    Scenario(name="nothing goes wrong with a large model", plan=NONE, hidden=LARGE),
)


def _cut_often(number: int) -> FaultPlan:
    plan = NONE
    for connection in range(number):
        plan = plan.cut(after_bytes=1_500_000, connection=connection)
    return plan


def link_scenarios() -> Iterator[Scenario]:
    """Yield what happens to a link."""
    short = {"corrupt a chunk up, TLS", "corrupt a chunk up, plain text"}
    blows = {
        "cut in mid-upload": NONE.cut(message=SECOND_CHUNK, after_bytes=70_000),
        "cut in mid-download": NONE.cut(way="down", message=MODEL_CHUNK, after_bytes=70_000),
        "cut before the update's head": NONE.cut(message=HEAD),
        "cut behind the update's head": NONE.cut(message=HEAD + 1),
        "cut three times": NONE.cut(after_bytes=1_500_000)
        .cut(way="down", after_bytes=1_200_000, connection=1)
        .cut(after_bytes=600_000, connection=2),
        "cut twenty times": _cut_often(20),
        "stall of 3 s in mid-upload": NONE.stall(3.0, message=SECOND_CHUNK, after_bytes=70_000),
        "stall of 3 s in mid-download": NONE.stall(
            3.0, way="down", message=MODEL_CHUNK, after_bytes=70_000
        ),
        "parted for 5 s in mid-upload": NONE.part(5.0, message=SECOND_CHUNK, after_bytes=70_000),
        "parted for 70 s in mid-upload": NONE.part(70.0, message=SECOND_CHUNK, after_bytes=70_000),
        "truncate a chunk up, plain text": NONE.truncate(
            1000, message=SECOND_CHUNK, after_bytes=5000
        ),
        "truncate a chunk down, plain text": NONE.truncate(
            1000, way="down", message=MODEL_CHUNK, after_bytes=5000
        ),
        "corrupt a chunk up, plain text": NONE.corrupt(message=SECOND_CHUNK, after_bytes=5000),
        "corrupt a chunk down, plain text": NONE.corrupt(
            way="down", message=MODEL_CHUNK, after_bytes=5000
        ),
    }
    for name, plan in blows.items():
        # A byte that plain text lets pass is found by its digest, and the update is refused.
        may_lose = "plain text" in name
        yield Scenario(
            name=name, plan=plan, hidden=LARGE, may_lose=may_lose, is_short=name in short
        )
    tls = {
        "cut in mid-upload, TLS": NONE.cut(after_bytes=1_500_000),
        "truncate a chunk up, TLS": NONE.truncate(1000, after_bytes=1_500_000),
        "truncate a chunk down, TLS": NONE.truncate(1000, way="down", after_bytes=1_500_000),
        "corrupt a chunk up, TLS": NONE.corrupt(after_bytes=1_500_000),
        "corrupt a chunk down, TLS": NONE.corrupt(way="down", after_bytes=1_500_000),
    }
    for name, plan in tls.items():
        yield Scenario(name=name, plan=plan, hidden=LARGE, has_tls=True, is_short=name in short)
    yield Scenario(name="200 ms of delay each way", plan=NONE.delay(0.2))
    yield Scenario(
        name="5 % loss at 20 ms",
        plan=NONE.lose(0.05, round_trip_seconds=0.02, seed=5),
        hidden=NARROW,
        is_short=True,
    )
    yield Scenario(name="125 kB/s", plan=NONE.throttle(125_000), hidden=NARROW)
    yield Scenario(
        name="1 Mbit/s by tc tbf", plan=NONE.confine(1_000_000), hidden=NARROW, needs="network"
    )
    yield Scenario(
        name="1 Mbit/s by tc tbf, down for 5 s in mid-upload",
        plan=NONE.confine(1_000_000, down_seconds=5.0),
        hidden=NARROW,
        needs="network",
    )


def death_scenarios() -> Iterator[Scenario]:
    """Yield SIGKILL of either side at each point of a round."""
    short = {"folded", "uploaded, not acknowledged"}
    for name, point in POINTS.items():
        if name in (*WRITING, *SHARED, *IN_TREES):
            continue
        yield Scenario(
            name=f"{point.side} killed: {name}",
            plan=NONE.kill(point.side, name, call=CALLS.get(name, 1)),
            hidden=LARGE if name in AMONG_CHUNKS else SMALL,
            is_short=name in short,
        )
    plan = NONE
    for after_bytes in CHECKPOINT_BYTES:
        plan = plan.kill("server", WRITING[0], after_bytes=after_bytes)
    yield Scenario(
        name=f"server killed in the checkpoint, {len(CHECKPOINT_BYTES)} times",
        plan=plan,
        is_short=True,
    )


SHARED = ("before the shared commit",)
IN_TREES = ("summed, not sent",)
WRITING = ("in the checkpoint",)
AMONG_CHUNKS = ("in mid-upload", "in its upload", "uploaded, not verified")
# Counted from the round in which it goes wrong: K is 2, an update has 3 chunks and 2 receipts.
CALLS = {
    "training": 2,
    "in its upload": 3,
    "uploaded, not acknowledged": 2,
    "acknowledged": 2,
    "in mid-upload": 2,
}
# Of about 3,000: in the header's length, in its text, in the tensors, and behind the last byte.
CHECKPOINT_BYTES = (5, 700, 2_300, 1 << 20)


def machine_scenarios() -> Iterator[Scenario]:
    """Yield what happens to machines."""
    yield Scenario(
        name="half of the fleet gone at once",
        plan=NONE.lose_devices(2),
        num_devices=4,
        may_lose=True,
        is_short=True,
    )
    yield Scenario(
        name="a device upgraded in mid-run", plan=NONE.upgrade(), may_lose=True, is_short=True
    )
    yield Scenario(
        name="the server's disk full", plan=NONE.fill_disk("server"), needs="mount", is_short=True
    )
    yield Scenario(
        name="the device's disk full", plan=NONE.fill_disk("client"), needs="mount", may_lose=True
    )
    yield Scenario(
        name="server killed, parted and stopped, with a standby",
        plan=NONE.fail_over("killed", "parted", "stopped"),
        is_short=True,
    )
    yield Scenario(
        name="an aggregator killed in mid-round, and the server above",
        plan=NONE.kill("aggregator", "acknowledged, not folded")
        .kill("server", "folded")
        .kill("aggregator", "summed, not sent"),
        num_devices=4,
        is_short=True,
    )
    for seconds in (600, -600):
        way = "fast" if seconds > 0 else "slow"
        for side in ("server", "client"):
            yield Scenario(
                name=f"the {side}'s clock 10 minutes {way}, TLS",
                plan=NONE.set_clock(side, seconds),
                has_tls=True,
                needs="cc",
            )


SCENARIOS = (*CALM, *link_scenarios(), *death_scenarios(), *machine_scenarios(), *event_scenarios())
SHORT = tuple(scenario for scenario in SCENARIOS if scenario.is_short)
