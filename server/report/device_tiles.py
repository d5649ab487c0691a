"""A device as the page shows it: one tile, with its plan, progress, memory, speed and state.

A tile is a flat JSON object, because a fleet of a thousand is sent twice a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headwater.common.errors import HeadwaterError
from headwater.common.messages import Plan, UpdateReport, Vitals
from headwater.server.report.round_points import Point, finite, label

Tile = dict[str, Any]
MAX_WHY_CHARACTERS = 300
MAX_TILES = 2_000  # devices beyond these are not shown

IDLE, PLANNED, COMPUTING, UPLOADING = "idle", "planned", "computing", "uploading"
READY, DONE, DROPPED, REFUSED, LEFT_OUT, GONE = (
    *("masking", "done", "dropped", "refused", "left out", "gone"),
)
UNFINISHED = {IDLE, PLANNED, COMPUTING, UPLOADING, READY}
LOST = {"ConnectionLost", "LateUpdate"}


def new_tile(name: str) -> Tile:
    """Return the tile of a device of which nothing is known but its name."""
    return {
        **dict.fromkeys(
            ("k", "done", "quota", "size", "memory", "limit", "seconds", "speed", "heat")
        ),
        **dict.fromkeys(("battery", "on_battery", "up", "down", "round", "share", "weight_share")),
        "name": label(name),
        "state": IDLE,
        "why": "",
        "labels": None,
    }


def note_plan(tile: Tile, plan: Plan) -> None:
    """Show the plan of the round in progress; nothing of it is done, and the state is not set."""
    tile.update(
        k=plan.accumulation_steps,
        size=plan.micro_batch_size,
        quota=plan.quota,
        done=0,
        round=plan.round,
        why=plan.reason[:MAX_WHY_CHARACTERS],
    )


def note_report(tile: Tile, report: UpdateReport) -> None:
    """Show what a device reported with its update."""
    tile.update(
        state=DONE,
        done=report.num_steps,
        seconds=report.seconds,
        speed=_speed(report.num_examples, report.seconds),
    )
    note_vitals(tile, report.vitals)


def note_part(tile: Tile, part: Point) -> None:
    """Show a committed round's figures of a device."""
    seconds, examples = part["seconds"], part["examples"]
    tile.update(
        k=part["k"],
        size=part["size"],
        round=part["round"],
        seconds=seconds,
        speed=_speed(examples, seconds),
        memory=part["memory"] or tile["memory"],
        done=part["k"],
        weight_share=part["weight_share"],
    )


def note_vitals(tile: Tile, vitals: Vitals) -> None:
    """Show a device's sensors; what it has no sensor for stays unknown."""
    tile.update(
        limit=vitals.memory_limit_bytes,
        heat=vitals.temperature_celsius,
        battery=vitals.battery,
        on_battery=vitals.is_on_battery,
        up=vitals.upload_bytes_per_second,
        down=vitals.download_bytes_per_second,
        share=vitals.share,
    )


def note_error(tile: Tile, error: HeadwaterError) -> None:
    """Show why a device is not in the round."""
    state = DROPPED if error.code in LOST else REFUSED
    tile.update(state=state, why=f"{error.code}: {error}"[:MAX_WHY_CHARACTERS])


def note_left_out(tiles: Mapping[str, Tile], reasons: Mapping[str, str]) -> None:
    """Show why the planner left devices out of the last round."""
    for name, why in reasons.items():
        if name in tiles:
            tiles[name].update(state=LEFT_OUT, why=why[:MAX_WHY_CHARACTERS])


def _speed(examples: int | None, seconds: float | None) -> float | None:
    """Return examples per second; None for a device that claims next to no time."""
    speed: float | None = finite(examples / seconds) if examples and seconds else None
    return speed
