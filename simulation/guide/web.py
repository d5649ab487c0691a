"""The guide's web application: its page, and a request for each computation. All GET, on loopback.

Each number of a request is cut to a range in which the computation takes a moment.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headwater.server.page import web as page
from headwater.simulation.guide import loop_lab, masks_lab, memory_lab, pace_lab, sums_lab
from headwater.simulation.guide.run_lab import RunLab

STATIC = Path(__file__).parent / "static"
FILES = page.FILES | {path.name: path for path in sorted(STATIC.iterdir()) if path.is_file()}


class Numbers:
    """The numbers of a request, as texts by name; each is read within its range."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._given = given

    def whole(self, name: str, low: int, high: int) -> int:
        """Return a whole number; the lowest if it is missing or none."""
        return round(self.real(name, low, high))

    def real(self, name: str, low: float, high: float) -> float:
        """Return a number; the lowest if it is missing or none."""
        try:
            value = float(self._given.get(name, low))
        except ValueError:
            return low
        return min(max(value, low), high) if value == value else low  # not NaN


Lab = Callable[[Numbers], dict[str, Any]]


def sums(given: Numbers) -> dict[str, Any]:
    """Compute the lab of accumulation."""
    examples = given.whole("examples", 2, sums_lab.MAX_EXAMPLES)
    return sums_lab.compare(examples, given.whole("size", 1, examples))


def memory(given: Numbers) -> dict[str, Any]:
    """Compute the lab of memory."""
    return memory_lab.measure(
        given.whole("batch", 1, memory_lab.MAX_BATCH),
        given.whole("size", 1, memory_lab.MAX_BATCH),
        given.whole("limit", 1, 1024) * 10**6,
    )


def loop(given: Numbers) -> dict[str, Any]:
    """Trace the training loop."""
    return loop_lab.trace(given.whole("size", 1, loop_lab.EXAMPLES))


def masks(given: Numbers) -> dict[str, Any]:
    """Compute the lab of masks."""
    devices = given.whole("devices", 3, 10)
    return masks_lab.look(
        devices, given.whole("colluders", 0, devices - 1), given.whole("digit", 0, 9)
    )


def pace(given: Numbers) -> dict[str, Any]:
    """Compute the lab of a round's time."""
    return pace_lab.plan(
        num_devices=given.whole("devices", 1, 40),
        spread=given.real("spread", 1, 32),
        examples=given.whole("examples", 1, 8192),
        micro_batch_size=given.whole("size", 1, 256),
        seconds_per_example=given.real("milliseconds", 0.01, 1000) / 1000,
        megabytes=given.real("megabytes", 0.01, 2000),
        megabytes_per_second=given.real("link", 0.05, 1000),
    )


def run_settings(given: Numbers) -> tuple[dict[str, Any], float]:
    """Return a run's settings by dotted keys, and how much slower its slow devices are."""
    devices, examples = given.whole("devices", 3, 60), given.whole("examples", 16, 2048)
    settings: dict[str, Any] = {
        "simulation.clients": devices,
        "plan.micro_batch_size": given.whole("size", 1, 64),
        "simulation.dropout": given.real("dropout", 0, 0.9),
    }
    steps, noise = given.whole("steps", 1, 32), given.real("noise", 0, 10)
    if noise > 0:
        settings |= {"privacy.noise_multiplier": max(noise, 0.01), "plan.accumulation_steps": 2}
    elif steps == 1:
        settings["plan.effective_batch_size"] = examples
    if steps > 1:
        settings |= {"local.algorithm": "fedavg", "local.steps": steps}
        if noise == 0:  # with K set, a local step is K micro-batches
            settings["local.batch_size"] = max(examples // (devices * steps), 1)
    return settings, given.real("spread", 1, 32)


LABS: dict[str, Lab] = {
    "sums": sums,
    "memory": memory,
    "loop": loop,
    "masks": masks,
    "pace": pace,
}


def guide_app(run: RunLab) -> ASGIApp:
    """Return the application."""
    lock = threading.Lock()  # one computation at a time: settrace and torch's threads are shared

    async def index(request: Request) -> Response:
        return FileResponse(FILES["guide.html"])

    async def file(request: Request) -> Response:
        path = FILES.get(request.path_params["name"])
        if path is None:
            return PlainTextResponse("there is no such file\n", HTTPStatus.NOT_FOUND)
        return FileResponse(path)

    async def lab(request: Request) -> Response:
        chosen = LABS.get(request.path_params["name"])
        if chosen is None:
            return PlainTextResponse("there is no such computation\n", HTTPStatus.NOT_FOUND)

        def compute() -> dict[str, Any]:
            with lock:
                return chosen(Numbers(request.query_params))

        return JSONResponse(await asyncio.to_thread(compute))

    async def start(request: Request) -> Response:
        settings, spread = run_settings(Numbers(request.query_params))
        await asyncio.to_thread(run.start, settings, spread=spread)
        return JSONResponse({"fault": run.fault})

    async def state(request: Request) -> Response:
        return JSONResponse(run.state())

    routes = [
        Route("/", index),
        Route("/static/{name}", file),
        Route("/lab/{name}", lab),
        Route("/run/start", start),
        Route("/run/state", state),
    ]
    guard = Middleware(page.Guard, token=None)
    zipped = Middleware(GZipMiddleware, minimum_size=1000)
    return Starlette(routes=routes, middleware=[guard, zipped])
