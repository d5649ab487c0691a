"""The guide as files: each slider has recorded positions, and an answer is found whole again."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

from headwater.simulation.guide.recording import GRIDS, RUN_CENTRE, RUN_GRID, Pool
from headwater.simulation.guide.web import FILES, LABS, Numbers

SLIDER = re.compile(
    r'data-name="(\w+)" min="([\d.]+)" max="([\d.]+)"(?: step="[\d.]+")? value="([\d.]+)"'
)


def sliders(lab: str) -> dict[str, tuple[float, float, float]]:
    """Return the least, the greatest and the first number of each slider of a lab."""
    page = FILES["guide.html"].read_text()
    section = page.partition(f'<section id="{lab}"')[2].partition("</section>")[0]
    return {
        name: (float(low), float(high), float(value))
        for name, low, high, value in SLIDER.findall(section)
    }


def test_every_slider_has_positions_in_its_range_and_stands_on_one_of_them() -> None:
    assert set(GRIDS) == set(LABS)
    for lab, grid in {**GRIDS, "run": RUN_GRID}.items():
        found = sliders(lab)
        assert set(found) == set(grid), lab
        for name, (low, high, value) in found.items():
            assert value in grid[name], (lab, name)
            assert low <= grid[name][0] <= grid[name][-1] <= high, (lab, name)
            assert all(a < b for a, b in pairwise(grid[name])), (lab, name)
    assert {name: value for name, (*_, value) in sliders("run").items()} == RUN_CENTRE


def unpacked(value: Any, pool: list[Any]) -> Any:
    """Return what the guide's own script makes of a recorded value."""
    match value:
        case {"$": int(place)}:
            return unpacked(pool[place], pool)
        case dict():
            return {name: unpacked(part, pool) for name, part in value.items()}
        case list():
            return [unpacked(part, pool) for part in value]
        case _:
            return value


def test_an_answer_is_found_whole_with_five_digits_and_equal_parts_are_stored_once() -> None:
    pool = Pool()
    given = [Numbers({"examples": "10", "size": size}) for size in ("3", "4")]
    answers = [LABS["sums"](one) for one in given]
    stored = [pool.put(answer) for answer in answers]
    for answer, one in zip(answers, stored, strict=True):
        found = unpacked(json.loads(json.dumps(one)), pool.values)
        assert found["sizes"] == answer["sizes"]
        for way, other in zip(answer["ways"], found["ways"], strict=True):
            assert {**way, "error": None} == {**other, "error": None}
            rounded = None if way["error"] is None else float(f"{way['error']:.5g}")
            assert other["error"] == rounded
    texts = [value for value in pool.values if isinstance(value, str)]
    assert len(texts) == len(set(texts)) > 0
