"""Importing a task's module: its own folder comes first for its own code, and for no other."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headwater.common.errors import UnknownTask
from headwater.common.user_code.task_spec import find_task_class

METHODS = """
    def new_model(self): ...
    def train_examples(self, *, data, part, num_parts): ...
    def loss_sum(self, model, batch): ...
"""


@pytest.fixture(autouse=True)
def _python_as_before() -> Iterator[None]:
    path, modules, finders = list(sys.path), dict(sys.modules), list(sys.meta_path)
    yield
    sys.path[:], sys.meta_path[:] = path, finders
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]
    sys.modules.update(modules)


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def task(top: str = "", *, words: str = "pass") -> str:
    return f"{top}\nclass Mine:\n    def word(self):\n        {words}\n{METHODS}"


def word(spec: str) -> object:
    return find_task_class(spec)().word()


def test_a_neighbour_is_imported_though_another_module_of_its_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = write(tmp_path / "elsewhere", utils="WORD = 'not this'")
    monkeypatch.syspath_prepend(elsewhere)
    own = write(
        tmp_path / "own", mine=task("import utils", words="return utils.WORD"), utils="WORD = 'own'"
    )
    assert word(f"{own}/mine.py:Mine") == "own"


def test_an_import_inside_a_function_that_runs_later_finds_the_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = write(tmp_path / "elsewhere", common="WORD = 'not this'")
    monkeypatch.syspath_prepend(elsewhere)
    lazy = "from common import WORD; return WORD"
    own = write(tmp_path / "own", mine=task(words=lazy), common="WORD = 'own'")
    assert word(f"{own}/mine.py:Mine") == "own"


def test_a_neighbour_of_an_earlier_task_does_not_stand_in_for_that_of_a_later_one(
    tmp_path: Path,
) -> None:
    text = task("import utils", words="return utils.WORD")
    for name in ("one", "two"):
        write(tmp_path / name, mine=text, utils=f"WORD = {name!r}")
    assert word(f"{tmp_path}/one/mine.py:Mine") == "one"
    assert word(f"{tmp_path}/two/mine.py:Mine") == "two"
    assert word(f"{tmp_path}/one/mine.py:Mine") == "one"


def test_a_task_s_files_hide_no_module_from_other_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = write(
        tmp_path / "library",
        a_library="def late():\n    import settings_of_it\n    return settings_of_it.WORD",
        settings_of_it="WORD = 'the library'",
    )
    monkeypatch.syspath_prepend(library)
    own = write(
        tmp_path / "own",
        mine=task("import a_library", words="return a_library.late()"),
        settings_of_it="WORD = 'the task'",
    )
    assert word(f"{own}/mine.py:Mine") == "the library"


def test_a_file_in_a_package_has_relative_and_absolute_imports(tmp_path: Path) -> None:
    imports = (
        "from .net import A\nfrom ..shared import B\nfrom my_pack.shared import B as C\nimport net"
    )
    files = {
        "my_pack/__init__": "",
        "my_pack/shared": "B = 'b'",
        "my_pack/tasks/__init__": "",
        "my_pack/tasks/mine": task(imports, words="return A + B + C + net.A"),
        "my_pack/tasks/net": "A = 'a'",
    }
    write(tmp_path, **files)
    assert word(f"{tmp_path}/my_pack/tasks/mine.py:Mine") == "abba"


@pytest.mark.parametrize("inits", [True, False])
def test_a_module_of_the_working_folder_is_named_with_dots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inits: bool
) -> None:
    text = task("from .net import A", words="from my_package.net import A as B; return A + B")
    write(tmp_path, **{"my_package/mine": text, "my_package/net": "A = 'a'"})
    if inits:
        write(tmp_path, **{"my_package/__init__": ""})
    monkeypatch.chdir(tmp_path)
    assert word("my_package.mine:Mine") == "aa"
    assert word("my_package.mine") == "aa"


def test_a_file_that_is_named_like_a_module_of_python_s_own_hides_it_not(tmp_path: Path) -> None:
    own = write(tmp_path, colorsys=task(words="return 'mine'"))
    assert word(f"{own}/colorsys.py:Mine") == "mine"
    assert not hasattr(sys.modules.get("colorsys"), "Mine")


def test_objects_of_a_task_s_file_can_be_pickled(tmp_path: Path) -> None:
    own = write(tmp_path, my_picklable=task("class Row:\n    pass", words="return Row()"))
    row = word(f"{own}/my_picklable.py:Mine")
    assert type(pickle.loads(pickle.dumps(row))) is type(row)


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    own = write(tmp_path, mine=task())
    assert find_task_class(f"{own}/mine.py:Mine") is find_task_class(f"{own}/mine.py:Mine")


def test_a_file_that_failed_is_imported_anew(tmp_path: Path) -> None:
    own = write(tmp_path, mine="1 / 0")
    with pytest.raises(UnknownTask):
        find_task_class(f"{own}/mine.py:Mine")
    write(tmp_path, mine=task(words="return 'mended'"))
    assert word(f"{own}/mine.py:Mine") == "mended"


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("\ndef (", r"line 2 \(def \(\): SyntaxError", "correct the file"),
        ("\0", r"SyntaxError: source code string cannot contain null bytes", "UTF-8"),
        (
            "import nowhere_at_all",
            r"line 1 \(.*\): ModuleNotFoundError",
            "nowhere_at_all.py beside",
        ),
        ("import sib", r"sib.py, line 2 \(1 / 0\): ZeroDivisionError", "correct the file"),
        ("from .sib import x", r"line 1 .*relative import", "__init__.py beside mine.py"),
        ("import sys\nsys.exit(3)", r"line 2 .*SystemExit: 3", "__main__"),
        ("from work.sib import x", "No module named 'work'", "--task work.tasks.mine:CLASS"),
    ],
)
def test_an_error_names_the_user_s_own_line_and_a_remedy(
    tmp_path: Path, text: str, message: str, remedy: str
) -> None:
    own = write(tmp_path / "work" / "tasks", mine=text, sib="\n1 / 0")
    with pytest.raises(UnknownTask, match=rf"mine\.py cannot be imported: .*{message}") as found:
        find_task_class(f"{own}/mine.py:Mine")
    assert remedy in found.value.remedy
    assert "\n" not in found.value.message + found.value.remedy


@pytest.mark.parametrize(("package", "extra"), [("peft", "transformers"), ("sklearn", "examples")])
def test_a_copy_of_an_example_that_lacks_a_package_names_the_extra(
    package: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    copy = tmp_path / "own.py"
    copy.write_text(f"import {package}\n")
    with pytest.raises(UnknownTask) as found:
        find_task_class(f"{copy}:Task")
    assert found.value.remedy == f"own.py needs {package}: pip install 'headwater[{extra}]'"


def test_an_example_that_lacks_a_package_names_the_extra() -> None:
    class Blocker:
        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> None:
            if name == "PIL":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name, module in list(sys.modules.items()):  # another test may have loaded the example
        file = str(getattr(module, "__file__", None))
        if name.partition(".")[0] == "PIL" or Path(file).name == "image_folder.py":
            del sys.modules[name]
    sys.meta_path.insert(0, Blocker)
    with pytest.raises(UnknownTask, match=r"line .*PIL") as found:
        find_task_class("examples/image_folder.py:ImageFolder")
    assert found.value.remedy.endswith("pip install 'headwater[examples]'")


def test_a_package_installed_below_the_working_folder_is_no_file_of_the_user_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / ".venv" / "lib" / "site-packages"
    write(packages / "an_installed_package", __init__=task())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(packages)
    found = find_task_class("an_installed_package:Mine")
    assert found.__module__ == "an_installed_package"
