"""docs/architecture.md names every file in the file's own words, and its links lead to files."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_tree", ROOT / "docs" / "write_tree.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_lists_the_files_in_their_own_words() -> None:
    module = writer()
    assert module.PAGE.read_text() == module.page(), "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    gone = [it for it in targets if it and ":" not in it and not (page.parent / it).exists()]
    assert not gone


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_in_code_is_one_of_a_file(page: Path) -> None:
    text = page.read_text()
    named = re.findall(
        r"`((?:client|common|server|aggregator|simulation|tests|benchmarks)/[\w/.]+)`", text
    )
    gone = [path for path in named if not (ROOT / path).exists()]
    assert not gone
