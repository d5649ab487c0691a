"""A script that names itself as the task starts one run, and none when it is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import headwater
from headwater.common.errors import SettingsError, UnknownTask
from tests.python_tasks import SIGNS, Signs

ROOT = Path(__file__).parents[2]
RUN = "headwater.simulate(__file__ + ':Signs', clients=3, rounds=1, workers=2)"


def script(folder: Path, *lines: str) -> Path:
    """Write a script with a task and some lines; its name is unlike every other module's."""
    file = folder / "script_with_its_own_task.py"
    task = Path(SIGNS.rpartition(":")[0]).read_text().partition("SIGNS = ")[0]
    file.write_text("\n".join([task, "import headwater", *lines]))
    return file


@pytest.mark.parametrize(
    "call",
    [RUN, "headwater.serve(Signs)", "headwater.take_part(Signs, server='127.0.0.1:9', name='a')"],
)
def test_a_file_that_starts_a_run_while_it_is_imported_is_refused(
    tmp_path: Path, call: str
) -> None:
    file = script(tmp_path, call)
    with pytest.raises(UnknownTask, match=f"{file.name} starts a run while it is imp") as refused:
        headwater.simulate(f"{file}:Signs", clients=3, rounds=1, progress=False)
    assert '`if __name__ == "__main__":`' in refused.value.remedy


def test_the_refusal_of_an_object_says_where_a_script_starts_its_run() -> None:
    with pytest.raises(SettingsError, match="is a Python object") as refused:
        headwater.simulate(Signs, workers=2, progress=False)
    assert '`if __name__ == "__main__":`' in refused.value.remedy


@pytest.mark.slow
@pytest.mark.parametrize("more", ["workers=2", "engine='grpc'"])
def test_a_script_that_names_itself_ends_with_or_without_the_guard(
    tmp_path: Path, more: str
) -> None:
    call = f"headwater.simulate(__file__ + ':Signs', clients=3, rounds=1, {more})"
    for lines, status in (
        ([call], 1),
        (['if __name__ == "__main__":', f"    {call}"], 0),
    ):
        ended = subprocess.run(
            [sys.executable, str(script(tmp_path, *lines))],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert ended.returncode == status, ended.stderr
        assert ("starts a run while it is imported" in ended.stderr) == bool(status)
