"""What ``import headwater`` offers, and what it costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import headwater


@pytest.mark.parametrize("name", headwater.__all__)
def test_each_public_name_can_be_used(name: str) -> None:
    assert getattr(headwater, name)


def test_a_type_checker_sees_the_names_that_python_sees() -> None:
    tree = ast.parse(Path(headwater.__file__).read_text())
    imported = {
        (alias.name, node.module)
        for block in tree.body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert imported == set(headwater._MODULES.items())
    assert {*headwater._MODULES, "__version__"} == set(headwater.__all__)


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'load_modle'"):
        getattr(headwater, "load_modle")  # noqa: B009


def test_the_import_alone_loads_no_torch() -> None:
    code = "import sys, headwater; print(*{'torch', 'flwr', 'numpy'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_completion_shows_the_public_names_alone() -> None:
    assert dir(headwater) == sorted(headwater.__all__)
