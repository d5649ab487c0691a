"""The figures on the pages are what the commands beside them print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.write_figures import PAGES, Block, blocks, printed

NUMBER = re.compile(r"\d+(?:,\d{3})*(?:\.\d+)?")
FOUND = [pytest.param(page, one, id=page.stem) for page in PAGES for one in blocks(page)]
RUN = [
    pytest.param(page, one, id=page.stem, marks=() if one.is_quick else pytest.mark.long)
    for page in PAGES
    for one in blocks(page)
]


def numbers(text: str) -> list[float]:
    return [float(one.replace(",", "")) for one in NUMBER.findall(text)]


@pytest.mark.parametrize(("page", "block"), FOUND)
def test_a_command_stands_beside_its_figures(page: Path, block: Block) -> None:
    """A reader can type what wrote them; a flag may choose the table, and a pipe the lines."""
    shown = re.sub(r"\s*\\\n\s*|\s+", " ", re.sub("<!--.*?-->", "", page.read_text()))
    command = block.command.partition(" | ")[0].partition(" --table")[0]
    assert command in shown


@pytest.mark.parametrize(("page", "block"), FOUND)
def test_a_block_is_filled(page: Path, block: Block) -> None:
    assert numbers(block.figures)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "block"), RUN)
def test_a_page_agrees_with_what_its_command_prints_today(page: Path, block: Block) -> None:
    """Another processor rounds otherwise; words are the same everywhere."""
    found = printed(block.command)
    assert NUMBER.sub("", found) == NUMBER.sub("", block.figures)
    assert numbers(found) == pytest.approx(numbers(block.figures), rel=0.05, abs=0.3)
