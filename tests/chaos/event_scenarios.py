"""Scenarios of releases, rivals for a folder, HTTP proxies and modes of training, as data."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import get_args

from tests.chaos.scenario import LARGE, SMALL, Mode, Scenario
from tests.faults import Action, Bundles, FaultPlan, Moment, Release

NONE = FaultPlan()
MOMENTS: tuple[Moment, ...] = get_args(Moment)
ON_THE_LINK: tuple[Moment, ...] = ("uploading", "downloading")
MODES_OF_TRAINING: tuple[Mode, ...] = ("masked", "int8", "local", "asynchronous")
ALL_EARLIER = ("server", "0", "1", "2")


def event_scenarios() -> Iterator[Scenario]:
    """Yield all of them."""
    yield from release_scenarios()
    yield from rival_scenarios()
    yield from http_proxy_scenarios()
    yield from mode_scenarios()
    yield from tree_scenarios()
    yield from bundle_scenarios()


def _size(when: Moment) -> int:
    return LARGE if when in ON_THE_LINK else SMALL


def release_scenarios() -> Iterator[Scenario]:
    """Yield an upgrade and its way back, of the server and of a device, in mid-run."""
    changes = {
        "earlier device upgraded": NONE.begin_earlier("0"),
        "device taken back to the earlier release": NONE,
        "server upgraded under earlier devices": NONE.begin_earlier(*ALL_EARLIER),
        "server taken back, and refused": NONE,
    }

    def changed(change: str, when: Moment, by: signal.Signals) -> FaultPlan:
        if "refused" in change:
            return NONE.do("take the server back", when, by=by)
        action: Action = "restart the server" if "server" in change else "restart the device"
        release: Release = "earlier" if "taken back" in change else "present"
        return changes[change].do(action, when, release=release, by=by)

    for change in changes:
        for when in MOMENTS:
            for by in (signal.SIGKILL, signal.SIGTERM):
                yield Scenario(
                    name=f"{change}, {when}, {by.name}",
                    plan=changed(change, when, by),
                    hidden=_size(when),
                    may_lose=by == signal.SIGTERM and "device" in change,
                    needs="history",
                    is_short=(change, when, by)
                    == ("server upgraded under earlier devices", "training", signal.SIGKILL),
                )
    for mode in MODES_OF_TRAINING:
        for change, when in zip(changes, (*ON_THE_LINK, "training", "uploading"), strict=True):
            yield Scenario(
                name=f"{change}, {when}, {mode}",
                plan=changed(change, when, signal.SIGKILL),
                hidden=_size(when),
                num_devices=3,
                mode=mode,
                may_lose=mode == "masked",
                needs="history",
            )
    earlier = NONE.begin_earlier("0")
    cuts = earlier.cut(after_bytes=1_500_000).cut(way="down", after_bytes=1_200_000, connection=1)
    for has_tls in (False, True):
        yield Scenario(
            name=f"an earlier device cut twice{', TLS' if has_tls else ''}",
            plan=cuts,
            hidden=LARGE,
            has_tls=has_tls,
            needs="history",
        )
    for when in MOMENTS:
        yield Scenario(
            name=f"device of another protocol, then upgraded, {when}",
            plan=NONE.do("let in another protocol", when),
            hidden=_size(when),
            needs="history",
        )


def rival_scenarios() -> Iterator[Scenario]:
    """Yield a second process in the folder of one that works, and a folder without a lock."""
    rivals: tuple[Action, ...] = (
        "start a second server",
        "start a second simulator",
        "start a second device",
        "race for the folder",
    )
    # A device tries its task when it starts, and would wait behind the gate of "training".
    of_devices = tuple(when for when in MOMENTS if when != "training")
    for action in rivals:
        for when in of_devices if action == "start a second device" else MOMENTS:
            yield Scenario(
                name=f"{action}, {when}",
                plan=NONE.do(action, when),
                hidden=_size(when),
            )
    for when in of_devices:
        yield Scenario(
            name=f"start a second device, {when}, TLS",
            plan=NONE.do("start a second device", when),
            hidden=_size(when),
            has_tls=True,
        )


def http_proxy_scenarios() -> Iterator[Scenario]:
    """Yield an HTTP proxy that is started anew, and one whose password changes for a while."""
    restart: Action = "restart the HTTP proxy"
    change: Action = "change the HTTP proxy's password"
    calm: Moment = "between rounds"
    with_server: tuple[Moment, ...] = ("uploading", "training")
    for has_tls in (False, True):
        tls = ", TLS" if has_tls else ""
        plans = {f"{restart}, {when}": (NONE.do(restart, when), when) for when in MOMENTS}
        plans |= {f"{change}, {when}": (NONE.do(change, when), when) for when in MOMENTS}
        # A connection in between may carry nothing, and have no moment on the link.
        plans[f"{restart} three times"] = NONE.do(restart, calm, times=3), calm
        for when in with_server:
            both = NONE.do("restart the server", when).do(restart, when)
            plans[f"restart the server and the HTTP proxy, {when}"] = both, when
        for name, (plan, when) in plans.items():
            yield Scenario(
                name=f"{name}{tls}",
                plan=plan,
                hidden=_size(when),
                has_tls=has_tls,
                has_http_proxy=True,
                needs="tinyproxy",
                is_short=has_tls and name == f"{restart}, uploading",
            )
    for mode in MODES_OF_TRAINING:
        yield Scenario(
            name=f"{restart}, uploading, {mode}",
            plan=NONE.do(restart, "uploading"),
            hidden=LARGE,
            num_devices=3,
            mode=mode,
            may_lose=mode == "masked",
            has_http_proxy=True,
            needs="tinyproxy",
        )


def mode_scenarios() -> Iterator[Scenario]:
    """Yield each mode of training with what goes wrong in plain rounds."""
    plans = {
        "nothing goes wrong": NONE,
        "cut in mid-upload": NONE.cut(after_bytes=400_000),
        "server killed: folded": NONE.kill("server", "folded"),
        "server killed: behind the checkpoint": NONE.kill("server", "behind the checkpoint"),
        "client killed: between micro-batches": NONE.kill("client", "between micro-batches"),
        "client killed: trained, place kept": NONE.kill("client", "trained, place kept"),
    }
    for mode in MODES_OF_TRAINING:
        for name, plan in plans.items():
            yield Scenario(
                name=f"{name}, {mode}",
                plan=plan,
                hidden=LARGE if plan.blows else SMALL,
                num_devices=3,
                mode=mode,
                may_lose=mode == "masked",
            )


def tree_scenarios() -> Iterator[Scenario]:
    """Yield the death of an aggregator at further points of a round."""
    for point in ("plans sent", "first update announced", "uploaded, not verified", "folded"):
        yield Scenario(
            name=f"aggregator killed: {point}", plan=NONE.kill("aggregator", point), num_devices=4
        )
    for point in ("plans sent", "folded", "behind the checkpoint"):
        yield Scenario(
            name=f"server above an aggregator killed: {point}",
            plan=NONE.kill("aggregator", "summed, not sent").kill("server", point),
            num_devices=4,
        )


def bundle_scenarios() -> Iterator[Scenario]:
    """Yield the next version of a task that is published while a round runs."""
    for how in get_args(Bundles):
        yield Scenario(
            name=f"the task's next version, {how}",
            plan=NONE.publish(how),
            needs="mount" if how == "disk full" else None,
            is_short=how == "device killed",
        )
