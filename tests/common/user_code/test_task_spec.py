"""What --task may name, and the errors for what it names wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from headwater.common.errors import UnknownTask
from headwater.common.user_code.task_spec import (
    code_at,
    find_task,
    find_task_class,
    name_of,
    source_file,
    split_spec,
)
from tests.venvs import ROOT

TASK = """
class {name}:
    def new_model(self): ...
    def train_examples(self, *, data, part, num_parts): ...
    def loss_sum(self, model, batch): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "spec_one.py").write_text(TASK.format(name="Rain") + "def make(): ...\n")
    (tmp_path / "spec_two.py").write_text(TASK.format(name="Rain") + TASK.format(name="Snow"))
    (tmp_path / "spec_none.py").write_text("class Half:\n    def new_model(self): ...\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("spec", "place", "class_name"),
    [
        ("a/b.py:C", "a/b.py", "C"),
        ("a/b.py", "a/b.py", None),
        ("a.b:C", "a.b", "C"),
        (r"C:\a\b.py:D", r"C:\a\b.py", "D"),
        (r"C:\a\b.py", r"C:\a\b.py", None),
    ],
)
def test_a_spec_is_a_place_and_perhaps_a_class(
    spec: str, place: str, class_name: str | None
) -> None:
    assert split_spec(spec) == (place, class_name)


@pytest.mark.parametrize("spec", ["", ":", ":Good", "my_task.py:"])
def test_a_spec_without_a_place_or_with_an_empty_class_is_refused(spec: str) -> None:
    with pytest.raises(UnknownTask, match=r"expected FILE\.py:Class or package\.module:Class"):
        find_task_class(spec)


@pytest.mark.parametrize(
    ("spec", "name"), [("a/b.py:C", "C"), ("a/b.py", "b"), ("x.y.z", "z"), ("x.y:Z", "Z")]
)
def test_a_spec_has_a_short_name(spec: str, name: str) -> None:
    assert name_of(spec) == name


@pytest.mark.parametrize("spec", ["spec_one.py", "spec_one", "./spec_one.py:Rain", "spec_one:Rain"])
def test_the_class_may_be_left_out_if_there_is_one_task(folder: Path, spec: str) -> None:
    assert find_task_class(spec).__name__ == "Rain"


OBJECTS = """
import types
def nothing(*args): ...
snow, rain = (
    types.SimpleNamespace(new_model=nothing, train_examples=nothing, loss_sum=nothing)
    for _ in range(2)
)
"""


def test_an_object_is_a_task_and_stands_back_behind_classes(folder: Path) -> None:
    (folder / "spec_objects.py").write_text(OBJECTS + "del snow\n")
    one = find_task("spec_objects.py:rain")
    assert find_task("spec_objects.py") is one
    assert not isinstance(one, type)
    assert find_task_class("spec_objects:rain") is type(one)
    (folder / "spec_both.py").write_text(OBJECTS + TASK.format(name="Rain"))
    assert find_task("spec_both.py").__name__ == "Rain"
    (folder / "spec_more.py").write_text(OBJECTS)
    with pytest.raises(UnknownTask, match="has 2 tasks: snow, rain"):
        find_task("spec_more.py")


def test_the_code_of_an_object_is_its_name_and_its_file(folder: Path) -> None:
    for name, more in (("spec_a", ""), ("spec_b", "# another\n")):
        (folder / f"{name}.py").write_text(OBJECTS + more)
    places = ("spec_a.py:rain", "spec_a.py:snow", "spec_b.py:rain")
    codes = [code_at(place) for place in places]
    assert len({*codes}) == 3
    assert codes[0].startswith("rain ")
    assert code_at("spec_a:rain") == codes[0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("spec_two.py", "has 2 tasks: Rain, Snow"),
        ("spec_none.py", "has no task: no class in it has the methods new_model"),
        ("spec_one.py:Rian", "has no class Rian; did you mean Rain"),
        ("spec_one.py:Cloud", "has no class Cloud; its tasks: Rain"),
        ("spec_one.py:make", "has no class make: it is a function"),
        ("spec_on.py:Rain", "no file spec_on.py in .*did you mean spec_one.py"),
        ("nowhere/a.py:A", "no file nowhere/a.py in .*there is no folder nowhere"),
        (".:Rain", "is a folder, not a task; it has spec_none.py, spec_one.py, spec_two.py"),
        ("spec_on:Rain", "no module spec_on in .*did you mean spec_one"),
        ("spec_one.deeper:Rain", "no module spec_one.deeper"),
        ("nowhere.at.all:Rain", "no module nowhere.at.all"),
        ("examples/digts.py:Digits", "no file examples/digts.py"),
        ("headwater.examples.digts:Digits", "did you mean headwater.examples.digits"),
    ],
)
def test_a_wrong_spec_is_refused_with_what_there_is(folder: Path, spec: str, message: str) -> None:
    with pytest.raises(UnknownTask, match=message) as found:
        find_task_class(spec)
    assert found.value.remedy


@pytest.mark.parametrize("spec", ["examples/digits.py:Digits", "headwater.examples.digits:Digits"])
def test_the_bundled_examples_are_found_in_any_folder(folder: Path, spec: str) -> None:
    assert find_task_class(spec).__name__ == "Digits"


def test_a_user_s_own_examples_folder_comes_before_the_bundled_one(folder: Path) -> None:
    (folder / "examples").mkdir()
    (folder / "examples" / "digits.py").write_text(TASK.format(name="Digits") + "OWN = True\n")
    assert find_task_class("examples/digits.py").__module__ != "headwater.examples.digits"
    assert source_file("examples/digits.py") == Path("examples/digits.py")


def test_no_other_path_is_searched_beside_the_package(folder: Path) -> None:
    with pytest.raises(UnknownTask, match="no file common"):
        find_task_class("common/task.py:Task")


def test_the_source_of_a_spec_is_found_without_importing_it(folder: Path) -> None:
    (folder / "spec_bad.py").write_text("1 / 0")
    assert source_file("spec_bad:X") == folder / "spec_bad.py"
    assert source_file("spec_bad.py:X") == Path("spec_bad.py")
    assert source_file("examples/digits.py:Digits") == ROOT / "examples" / "digits.py"
    assert source_file("nowhere:X") is None
