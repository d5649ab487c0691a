"""Data made up for a new task: small, learnable, unlike on each device, the same each time."""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

SEED = 7
NUM_ROWS, NUM_TEST_ROWS = 240, 200
GAPS = 0.05
"""The part of a table's cells that are empty."""
HOURS, NUM_TEST_HOURS = 480, 240
NUM_PICTURES, NUM_TEST_PICTURES, SIDE = 60, 90, 32
NUM_SENTENCES, NUM_TEST_SENTENCES = 240, 120

Rows = list[dict[str, str]]


def write_table(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Write a CSV file with a header."""
    with path.open("w", newline="", encoding="utf-8") as lines:
        writer = csv.DictWriter(lines, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def table(number: int, *, is_regression: bool, num_rows: int = NUM_ROWS) -> Rows:
    """Return the customers of a device; 0 is the test's."""
    draw = random.Random(f"{SEED} table {number}")
    rows = []
    for _ in range(num_rows):
        age, income = draw.gauss(45 + 3 * (number % 4), 15), draw.lognormvariate(10.4, 0.5)
        visits = draw.randint(0, 40)
        region = draw.choice(["east", "north", "south", "west"])
        plan = draw.choice(["basic", "family", "student"])
        wish = 0.12 * (visits - 15) + (1.2 if plan == "family" else 0.0)
        wish += 0.8 if region == "south" else -0.02 * (age - 45)
        row = {
            "age": f"{min(max(age, 18), 90):.0f}",
            "income": f"{min(income, 120_000):.0f}",
            "visits": str(visits),
            "region": region,
            "plan": plan,
        }
        row = {name: "" if draw.random() < GAPS else cell for name, cell in row.items()}
        if is_regression:
            row["spends"] = f"{max(40 + 25 * wish + draw.gauss(0, 6), 0):.2f}"
        else:
            row["renews"] = "yes" if draw.random() < 1 / (1 + math.exp(-2 * wish)) else "no"
        rows.append(row)
    return rows


def series(number: int, *, num_hours: int = HOURS) -> Rows:
    """Return the load of a house by the hour: a day's shape, a week's, and noise."""
    draw = random.Random(f"{SEED} series {number}")
    base, evening = draw.uniform(1, 2), draw.uniform(17, 21)
    rows = []
    for hour in range(num_hours):
        day = math.exp(-(((hour % 24) - evening) ** 2) / 8) * (3 if hour // 24 % 7 < 5 else 4)
        morning = math.exp(-(((hour % 24) - 7) ** 2) / 4)
        load = base + day + morning + draw.gauss(0, 0.15)
        rows.append({"hour": str(hour), "load": f"{min(max(load, 0), 10):.2f}"})
    return rows


def texts(number: int, *, num_sentences: int = NUM_SENTENCES) -> str:
    """Return short reports in plain sentences."""
    draw = random.Random(f"{SEED} text {number}")
    who = ["the pump", "the north tank", "the valve", "the old engine", "the filter"]
    what = ["was checked", "is running well", "needs oil", "was cleaned", "makes a noise"]
    when = ["today", "this morning", "after the storm", "on monday", "as planned"]
    sentences = (
        f"{draw.choice(who)} {draw.choice(what)} {draw.choice(when)}." for _ in range(num_sentences)
    )
    return "\n".join(sentences) + "\n"


def write_pictures(folder: Path, number: int, *, num_pictures: int = NUM_PICTURES) -> None:
    """Write pictures of shapes on noise, a folder for each class.

    Raises:
        ImportError: Pillow is not installed.
    """
    from PIL import Image, ImageDraw

    draw = random.Random(f"{SEED} images {number}")
    shapes: dict[str, Callable[[ImageDraw.ImageDraw, int, int, int, str], None]] = {
        "circle": lambda on, x, y, r, ink: on.ellipse((x - r, y - r, x + r, y + r), fill=ink),
        "square": lambda on, x, y, r, ink: on.rectangle((x - r, y - r, x + r, y + r), fill=ink),
        "triangle": lambda on, x, y, r, ink: on.polygon(
            [(x, y - r), (x - r, y + r), (x + r, y + r)], fill=ink
        ),
    }
    for at in range(num_pictures):
        name = list(shapes)[at % len(shapes)]
        noise = bytes(draw.randrange(90) for _ in range(3 * SIDE * SIDE))
        picture = Image.frombytes("RGB", (SIDE, SIDE), noise)
        radius = draw.randint(6, 10)
        x, y = (draw.randint(radius, SIDE - radius) for _ in range(2))
        shapes[name](ImageDraw.Draw(picture), x, y, radius, draw.choice(["white", "gold", "cyan"]))
        below = folder / name
        below.mkdir(parents=True, exist_ok=True)
        picture.save(below / f"{at:03}.png")


def dealt(rows: Sequence[dict[str, str]], num_devices: int) -> tuple[list[Rows], Rows]:
    """Deal a user's own rows to devices, and hold a fifth out for the test; in a seeded order."""
    shuffled = list(rows)
    random.Random(SEED).shuffle(shuffled)
    num_test = max(len(shuffled) // 5, 1)
    test, rest = shuffled[:num_test], shuffled[num_test:]
    return [rest[number::num_devices] for number in range(num_devices)], test


def cut(rows: Iterable[dict[str, str]], num_devices: int) -> tuple[list[Rows], Rows]:
    """Cut a user's own series into stretches for the devices, and the last fifth for the test."""
    kept = list(rows)
    end = len(kept) - max(len(kept) // 5, 1)
    bounds = [end * number // num_devices for number in range(num_devices + 1)]
    parts = [kept[low:high] for low, high in pairwise(bounds)]
    return parts, kept[end:]
