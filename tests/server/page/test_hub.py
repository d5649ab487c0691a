"""What open pages are sent: everything first, then the changes, and everything again if late."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import pytest

from headwater.common.messages import DeviceReport
from headwater.common.settings.schema import Settings
from headwater.server.page import hub as hubs
from headwater.server.page.hub import Hub
from headwater.server.page.run_view import RunView
from tests.round_rows import row

Test = Callable[[RunView, Hub], Awaitable[None]]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs, "TICK_SECONDS", 0.001)


def view_of(*names: str) -> RunView:
    view = RunView(Settings())
    view.begun(1, {n: DeviceReport(name=n, num_examples=5, layout_digest="x") for n in names})
    return view


@asynccontextmanager
async def open_page(hub: Hub) -> AsyncIterator[Callable[[], Awaitable[tuple[str, Any]]]]:
    async with aclosing(hub.listen()) as stream:

        async def read() -> tuple[str, Any]:
            event, text = await anext(stream)
            return event, json.loads(text)

        yield read


def in_loop(test: Test, *names: str) -> None:
    async def main() -> None:
        view = view_of(*names)
        hub = Hub(view)
        running = asyncio.create_task(hub.run())
        async with asyncio.timeout(120):
            await test(view, hub)
            hub.end()
            await running

    asyncio.run(main())


def test_a_page_gets_everything_and_then_what_has_changed() -> None:
    async def test(view: RunView, hub: Hub) -> None:
        view.on_round(row(1, "a", "b"))
        async with open_page(hub) as read:
            event, found = await read()
            assert event == "all"
            assert [one["name"] for one in found["devices"]] == ["a", "b", "c"]
            await read()  # a tick without changes
            view.on_round(row(2, "a"))
            points: list[Any] = []
            devices: list[Any] = []
            while not points:
                event, found = await read()
                assert event == "changes"
                points, devices = found["points"], found["devices"]
            assert [point["round"] for point in points] == [2]
            assert [one["name"] for one in devices] == ["a"], "b has not changed"

    in_loop(test, "a", "b", "c")


def test_a_page_that_missed_ticks_gets_everything_again() -> None:
    async def test(view: RunView, hub: Hub) -> None:
        async with open_page(hub) as slow, open_page(hub) as read:
            await slow()
            await read()
            for _ in range(3):
                await read()
            assert (await slow())[0] == "all"

    in_loop(test, "a")


def test_the_end_reaches_every_page_and_ends_its_stream() -> None:
    async def test(view: RunView, hub: Hub) -> None:
        async with open_page(hub) as read:
            await read()
            view.on_round(row(1, "a"))
            view.ended()
            hub.end()
            found: dict[str, Any] = {}
            with suppress(StopAsyncIteration):
                while True:
                    _, found = await read()
            assert found["status"]["has_ended"]
            assert found["num_points"] == 1

    in_loop(test, "a")


async def test_devices_learn_when_the_first_page_opens_and_the_last_is_closed() -> None:
    heard: list[bool] = []
    hub = Hub(RunView(Settings(), watch=heard.append))
    async with open_page(hub) as first:
        await first()
        async with open_page(hub) as second:
            await second()
        assert heard == [True]
    assert heard == [True, False]


async def test_without_a_page_nothing_is_computed() -> None:
    class Counting(RunView):
        num_looks = 0

        def tiles(self) -> Any:
            self.num_looks += 1
            return super().tiles()

    view = Counting(Settings())
    hub = Hub(view)
    running = asyncio.create_task(hub.run())
    await asyncio.sleep(0.05)
    assert view.num_looks == 0
    hub.end()
    await running


async def test_ticks_are_rarer_where_each_is_much_work() -> None:
    class Heavy(RunView):
        num_looks = 0

        def tiles(self) -> Any:
            self.num_looks += 1
            end = time.thread_time() + 0.01
            while time.thread_time() < end:
                pass
            return super().tiles()

    view = Heavy(Settings())
    hub = Hub(view)
    running = asyncio.create_task(hub.run())
    begun = time.monotonic()
    async with open_page(hub) as read:
        await read()
        await asyncio.sleep(0.6)
    looks, seconds = view.num_looks, time.monotonic() - begun
    hub.end()
    await running
    assert looks <= 3 + seconds / 0.5, "10 ms of work, and then half a second without any"


def test_an_opened_page_and_the_changes_after_it_agree() -> None:
    async def test(view: RunView, hub: Hub) -> None:
        view.tiles()["a"].update(state="done", done=4)
        async with open_page(hub) as other, open_page(hub) as late:
            await other()
            await other()  # a tick: all have seen "a" as done
            note = {"state": "computing", "done": 0}
            view.tiles()["a"].update(note)
            _, found = await late()
            page = {one["name"]: one for one in found["devices"]}
            assert {name: page["a"][name] for name in note} == note
            view.tiles()["a"].update(state="done", done=4)
            while page["a"]["state"] != "done":
                event, found = await late()
                for one in found["devices"]:
                    page[one["name"]] = (page[one["name"]] if event == "changes" else {}) | one
            assert page["a"]["done"] == 4

    in_loop(test, "a")
