"""A new task runs at once on made-up data, and takes a user's own table as it is."""

from __future__ import annotations

import csv
import runpy
from pathlib import Path
from typing import Any

import pytest

import headwater
from headwater.common.errors import SettingsError
from headwater.simulation.new.columns import MAX_CATEGORIES, table_of
from headwater.simulation.new.command import KINDS, new_task

OWN = "id,age,town,size,sold,constant,price\n"


def make(kind: str, folder: Path, **more: Any) -> Path:
    chosen: dict[str, Any] = {"data": None, "label": None, "num_devices": 3, **more}
    new_task(kind, folder, **chosen)
    return folder


def trained(kind: str, folder: Path, rounds: int) -> headwater.Run:
    return headwater.simulate(
        f"{folder}/task.py:{KINDS[kind].name}",
        data=f"{folder}/devices/*",
        rounds=rounds,
        optimizer="adam",
        learning_rate=0.01,
        progress=False,
    )


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rounds", "metric", "least", "most"),
    [
        ("table", 40, "test_accuracy", 0.8, 1.0),
        ("regression", 40, "test_mae", 0.0, 12.0),
        ("series", 30, "test_mae", 0.0, 0.6),
        ("images", 5, "test_accuracy", 0.0, 1.0),
        ("text", 3, "test_accuracy", 0.1, 1.0),
    ],
)
def test_a_new_task_learns_from_its_made_up_data(
    tmp_path: Path, kind: str, rounds: int, metric: str, least: float, most: float
) -> None:
    folder = make(kind, tmp_path / "mine")
    run = trained(kind, folder, rounds)
    assert run.history[-1].loss < run.history[0].loss
    assert least <= run.metrics[metric] <= most
    text = (folder / "README.md").read_text()
    assert f"--task {folder}/task.py:{KINDS[kind].name}" in text


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Return a user's own file, with gaps, categories, names, and rows without a label."""
    path = tmp_path / "own.csv"
    rows = []
    for at in range(120):
        town = ("Ulm", "Jena", "")[at % 3]
        age = "" if at % 7 == 0 else str(20 + at % 50)
        price = "" if at == 5 else f"{100 + 10 * (at % 50) + (50 if town == 'Ulm' else 0)}"
        rows.append(f"name{at},{age},{town},{at % 5},{('yes', 'no')[at % 2]},same,{price}\n")
    path.write_text(OWN + "".join(rows), encoding="utf-8-sig")
    return path


def test_the_columns_of_an_own_table_are_read_from_it(own: Path) -> None:
    table = table_of(own, label=None, is_regression=False)
    assert (table.label, table.classes, table.num_unlabelled) == ("price", (), 1)
    assert table.label_range == (100.0, 640.0)
    assert table.numbers == {"age": (20.0, 69.0), "size": (0.0, 4.0)}
    assert table.categories == {"town": ("Jena", "Ulm"), "sold": ("no", "yes")}
    assert set(table.passed_over) == {"id", "constant"}
    assert table_of(own, label="sold", is_regression=False).classes == ("no", "yes")
    assert len(table_of(own, label="size", is_regression=False).classes) == 5
    assert table_of(own, label="size", is_regression=True).classes == ()


def test_a_cell_that_is_no_number_is_named_where_the_others_are(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    rows = (f"{'2x.5' if at == 57 else at / 7},{at},{at % 2}\n" for at in range(120))
    path.write_text("temp,more,label\n" + "".join(rows))
    table = table_of(path, label=None, is_regression=False)
    assert "numbers but '2x.5'" in table.passed_over["temp"]


def test_an_own_table_is_dealt_to_devices_and_learned(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make("regression", tmp_path / "mine", data=own)
    dealt = [*(folder / "devices").iterdir(), folder / "test.csv"]
    found = [row["id"] for path in dealt for row in rows_of(path)]
    assert sorted(found) == sorted(f"name{at}" for at in range(120) if at != 5)
    constants = runpy.run_path(str(folder / "task.py"))
    assert constants["NUMBERS"] == {"age": (20.0, 69.0), "size": (0.0, 4.0)}
    assert trained("regression", folder, 40).metrics["test_mae"] < 80
    shown = " ".join(capsys.readouterr().out.split())
    assert "Passed over: id: it has 119 different texts" in shown
    assert "1 row without a label" in shown


def test_an_own_series_is_cut_into_stretches(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    path.write_text("hour,watts\n" + "".join(f"{at},{100 + at % 12}\n" for at in range(200)))
    folder = make("series", tmp_path / "mine", data=path)
    test = rows_of(folder / "test.csv")
    assert [row["hour"] for row in test] == [str(at) for at in range(160, 200)]
    constants = runpy.run_path(str(folder / "task.py"))
    assert (constants["VALUE"], constants["VALUE_RANGE"]) == ("watts", (100.0, 111.0))
    assert trained("series", folder, 2).history


MANY = "".join(f"{at},text{at}\n" for at in range(MAX_CATEGORIES + 1))


@pytest.mark.parametrize(
    ("kind", "content", "label", "message"),
    [
        ("table", "a;b\n1;2\n", None, "other marks than commas"),
        ("table", "a,b\n", None, "no rows"),
        ("table", "a,a,b\n1,2,x\n", None, "two columns 'a'"),
        ("table", "a,b\n1,x\n2,y\n", None, "2 rows, too few for 3 devices and a test"),
        ("series", "a,b\n1,2\n2,3\n", None, "2 rows, too few for 3 devices and a test"),
        ("table", "a,b\n1,2\n", "c", "no column 'c'"),
        ("table", "a,b\n1,\n", None, "no value in the column 'b'"),
        ("table", "a,b\n1,x\n2,x\n", None, "one value, 'x'"),
        ("table", f"a,b\n{MANY}", None, "51 different texts"),
        ("table", "a,b\n1,x\n1,y\n", None, "no column but 'b'"),
        ("regression", "a,b\n1,x\n2,y\n", None, "not every 'b' is a number"),
        ("series", "a,b\n1,x\n2,y\n", None, "not every 'b' is a number"),
        ("series", "a,b\n1,2\n2,3\n", "c", "no column 'c'"),
        ("text", "a,b\n1,2\n", None, "for tables and series"),
        ("sound", "a,b\n1,2\n", None, "no kind 'sound'"),
    ],
)
def test_what_cannot_be_used_is_named_and_nothing_is_written(
    tmp_path: Path, kind: str, content: str, label: str | None, message: str
) -> None:
    path = tmp_path / "own.csv"
    path.write_text(content)
    with pytest.raises(SettingsError, match=message):
        make(kind, tmp_path / "mine", data=path, label=label)
    assert not (tmp_path / "mine").exists()


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SettingsError, match="holds something"):
        make("table", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
