"""Writes into the documents what the command beside a figure prints.

A block stands between ``<!-- figures: COMMAND -->`` and ``<!-- end of figures -->``. ``make
figures`` runs each command, in a folder of its own that has the examples and benchmarks, and puts
what it prints in its place: a Markdown table as it is, anything else as a block of text. Commands
of virtual devices print the same on every machine. A slow test says when a page no longer agrees
with those that take seconds, which are ``figures, quick``, and a long test with the others.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(
    r"<!-- figures(?P<quick>, quick)?: (?P<command>.+?) -->\n"
    r"(?P<figures>.*?)<!-- end of figures -->",
    re.DOTALL,
)
LINKED = ("benchmarks", "examples")


class Block(NamedTuple):
    """A block of figures on a page."""

    command: str
    figures: str
    is_quick: bool


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in their order."""
    found = BLOCK.finditer(page.read_text())
    return [Block(one["command"], one["figures"], bool(one["quick"])) for one in found]


def printed(command: str) -> str:
    """Run a command of the shell and return what it prints, as it stands on a page.

    Raises:
        RuntimeError: it failed; with what it wrote to its standard error.
    """
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with TemporaryDirectory() as folder:
        for name in LINKED:
            (Path(folder) / name).symlink_to(ROOT / name)
        found = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command],
            cwd=folder,
            env={**os.environ, "PATH": beside, "COLUMNS": "200"},
            capture_output=True,
            text=True,
        )
    if found.returncode:
        raise RuntimeError(f"{command}: exit status {found.returncode}\n{found.stderr}")
    text = found.stdout.strip("\n")
    return f"\n{text}\n\n" if text.startswith("|") else f"\n```text\n{text}\n```\n\n"


def rewrite(page: Path) -> None:
    """Run the commands of a page, and write what they print."""

    def anew(found: re.Match[str]) -> str:
        print(f"{page.name}: {found['command']}", flush=True)
        begun, _, _ = found[0].partition("\n")
        return f"{begun}\n{printed(found['command'])}<!-- end of figures -->"

    page.write_text(BLOCK.sub(anew, page.read_text()))


def main(names: Iterable[str]) -> None:
    """Rewrite the pages with these names, or all that have figures."""
    chosen = set(names)
    for page in PAGES:
        if blocks(page) and (page.name in chosen or not chosen):
            rewrite(page)


if __name__ == "__main__":
    main(sys.argv[1:])
