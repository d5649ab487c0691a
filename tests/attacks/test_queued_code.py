"""A run waits in a queue, and somebody changes its code before it begins."""

from __future__ import annotations

import os
import py_compile
import sys
from collections.abc import Iterator
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

import pytest

from headwater.common.errors import CodeChanged
from headwater.common.settings.schema import SETTINGS_FILE, Settings
from headwater.common.settings.sources import load_run
from headwater.common.task import load_task
from headwater.server.run_sequence import serve_runs
from headwater.server.succession.run_queue import queued_runs, submit, take_next
from headwater.server.succession.submission import read_submission

TASK = (
    "from tests.python_tasks import Signs\nimport beside\n\nclass Mine(Signs):\n    version = 1\n"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with a task, a file that it imports, and a link to the task."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    Path("mine.py").write_text(TASK)
    Path("beside.py").write_text("")
    Path("link.py").symlink_to("mine.py")
    Path("run").mkdir()
    yield tmp_path
    forget_modules()


def forget_modules() -> None:
    """Forget the task's modules; one has another name where its own is found elsewhere, too."""
    for name in ("mine", "link", "beside"):
        sys.modules.pop(name, None)
        sys.modules.pop(f"headwater_task_{name}", None)


def submitted(task: str = "mine.py:Mine") -> None:
    """Put a run of the task into the queue of the run in ``run``."""
    Path("next.toml").write_text(f'task = "{task}"\nrounds = 1')
    settings = read_submission(Path("next.toml"), server_folder=Path.cwd())
    submit(Path("run"), settings, is_next=False)


def taken() -> Settings:
    """Let the server take the run from the queue; return its settings."""
    out = take_next(Path("run").absolute(), default_out=Path("next"))
    assert out is not None
    return load_run(None, {"out": out}, resume=True)


def version() -> int:
    task: Any = load_task("mine.py:Mine")
    return int(task.version)


def leaves_a_mark(text: str) -> str:
    return f"open('mark', 'w')\n{text}"


@pytest.mark.parametrize(
    ("task", "swapped"), [("mine", "mine.py"), ("mine", "beside.py"), ("link", "link.py")]
)
def test_a_queued_run_begins_with_no_other_code_than_it_was_submitted_with(
    folder: Path, task: str, swapped: str
) -> None:
    """The file is replaced, or one that it imports, or a link leads to another."""
    submitted(f"{task}.py:Mine")
    Path(swapped).unlink()
    Path(swapped).write_text(leaves_a_mark(TASK))
    with pytest.raises(CodeChanged, match=r"its SHA-256 was \w{64}, and is \w{64}") as caught:
        taken()
    assert swapped in caught.value.message
    assert "submit the run again" in str(caught.value.remedy)
    assert len(queued_runs(Path("run"))) == 1
    assert not Path("mark").exists()


def test_a_queued_run_trains_the_edited_file_that_it_was_submitted_with(folder: Path) -> None:
    """The server still has the file as it was, from a run of the same task."""
    assert version() == 1
    Path("mine.py").write_text(TASK.replace("version = 1", "version = 2"))
    os.utime("mine.py", ns=(0, 0))
    submitted()
    taken()
    assert version() == 2


def test_compiled_code_beside_the_submitted_file_is_not_run(folder: Path) -> None:
    """Python takes it for the file's own, by the file's time and size."""
    submitted()
    forget_modules()  # the server has another process
    file, other = Path("mine.py").absolute(), Path("other.py")
    other.write_text(leaves_a_mark(TASK))
    compiled = Path(cache_from_source(str(file)))
    py_compile.compile(str(other), str(compiled), doraise=True)
    stamp = [int(file.stat().st_mtime), file.stat().st_size]
    content = compiled.read_bytes()
    own = b"".join(number.to_bytes(4, "little") for number in stamp)
    compiled.write_bytes(content[:8] + own + content[16:])
    taken()
    assert version() == 1
    assert not Path("mark").exists()


def test_a_server_killed_before_the_first_round_looks_at_the_code_again(folder: Path) -> None:
    submitted()
    settings = taken()
    Path("mine.py").write_text(leaves_a_mark(TASK))
    with pytest.raises(CodeChanged) as caught:
        serve_runs(settings, None, resume=True)
    assert SETTINGS_FILE in str(caught.value.remedy)
    assert not Path("mark").exists()
