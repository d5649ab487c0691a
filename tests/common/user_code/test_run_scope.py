"""A run's scope has caches and objects of its own, and leaves none behind."""

from __future__ import annotations

import asyncio
import gc
import weakref

from headwater.common.user_code.run_scope import cached_in_scope, object_named, run_scope


class Costly:
    pass


@cached_in_scope()
def costly(_: str) -> Costly:
    return Costly()


def test_a_result_is_cached_in_its_own_scope() -> None:
    outside = costly("a")
    with run_scope({}):
        assert costly("a") is costly("a")
        assert costly("a") is not outside
    assert costly("a") is outside
    costly.cache_clear()
    assert costly("a") is not outside


def test_a_scope_that_ended_keeps_nothing_in_memory() -> None:
    with run_scope({}):
        reference = weakref.ref(costly("a"))
    gc.collect()
    assert reference() is None


def test_objects_are_found_by_name_in_their_scope_alone() -> None:
    task = object()
    with run_scope({"python:Task": task}):
        assert object_named("python:Task") is task
        with run_scope({}):
            assert object_named("python:Task") is None
    assert object_named("python:Task") is None


def test_a_scope_holds_in_a_thread_of_asyncio() -> None:
    async def costly_in_thread() -> Costly:
        return await asyncio.to_thread(costly, "a")

    with run_scope({}):
        assert asyncio.run(costly_in_thread()) is costly("a")
