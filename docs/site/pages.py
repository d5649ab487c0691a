"""The site's own pages, as a hook of mkdocs: the README first, the Python API, and the guide."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
# A link to a file of the repository that is no page, as [planner](../server/planning/planner.py).
OUTSIDE = re.compile(
    r"(?<!!)\[([^\]]+)\]\((?:\.\./[^)]*|(?!https?:|#)[^):]*/[^)]*|LICENSE|Makefile)\)"
)


def on_files(files: Files, config: Any) -> Files:
    """Add the README as the first page, the page of the Python API, and the recorded guide."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=readme.replace("](docs/", "](")))
    files.append(File.generated(config, "api.md", content=api_page()))
    for path, content in recorded_guide().items():
        files.append(File.generated(config, f"guide/{path}", content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Show links to the repository's other files as their text."""
    return OUTSIDE.sub(r"\1", markdown)


def api_page() -> str:
    """Return the page of the public names, which mkdocstrings fills from their docstrings."""
    names = sorted(public_names().items())
    return "# Python API\n\n" + "\n\n".join(f"::: {module}.{name}" for name, module in names) + "\n"


def recorded_guide() -> dict[str, bytes]:
    """Return the guide's files; this repository's own code computes their answers now."""
    sys.path.insert(0, str(ROOT))
    from headwater.simulation.guide.recording import guide_files

    return guide_files()


def public_names() -> dict[str, str]:
    """Return the names of ``import headwater``, and the module that defines each."""
    tree = ast.parse((ROOT / "headwater" / "__init__.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_MODULES":
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise LookupError("headwater/__init__.py has no table of its public names")
