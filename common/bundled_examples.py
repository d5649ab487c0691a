"""Finds the files of the bundled examples, in a checkout and in an installed wheel alike."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = "examples"
# The checkout, a Flower bundle, or the installed package: each has a folder of this name.
HOME = Path(__file__).resolve().parents[1]


def existing_or_bundled(path: Path) -> Path:
    """Return the path; in place of ``examples/...`` that does not exist, the bundled example."""
    if path.is_absolute() or path.exists() or path.parts[:1] != (EXAMPLES,):
        return path
    bundled = HOME / path
    return bundled if bundled.exists() else path


def is_bundled(path: Path) -> bool:
    """Whether a file belongs to the bundled examples."""
    return path.resolve().is_relative_to(HOME / EXAMPLES)
