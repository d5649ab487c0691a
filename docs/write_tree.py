"""Writes the list of files in docs/architecture.md from the first lines of their docstrings.

``make docs`` runs it, and a test holds the page to it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- tree -->\n", "<!-- end of tree -->\n"
PACKAGES = ("server", "client", "aggregator", "common", "simulation")


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].rstrip(".:").replace("``", "`")


def tree() -> str:
    """Return the list as Markdown: a heading for each folder, a line for each file."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    for package in PACKAGES:
        folders = sorted(path.parent for path in (ROOT / package).rglob("__init__.py"))
        for folder in folders:
            name = folder.relative_to(ROOT).as_posix()
            yield f"\n{'##' if name == package else '###'} {name}/\n"
            yield first_line(folder / "__init__.py") + ".\n"
            for path in sorted(folder.glob("*.py")):
                if not path.name.startswith("__") and "_pb2" not in path.name:
                    yield f"- [{path.stem}](../{name}/{path.name}): {first_line(path)}"


def page() -> str:
    """Return the page with the list in its place."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + tree() + "\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(page())
