"""Headwater: federated training for the computers that people already own.

The rooms lie at the top of the repository (``server/``, ``client/``, ``common/``, ``simulation/``)
and are imported from here alone, so that a user's own ``common.py`` or ``client/`` collides with
nothing. In a checkout and for type checkers the folders beside this file are symbolic links; a
wheel has the folders themselves.
"""

from __future__ import annotations

from pathlib import Path

__version__ = "0.1.0"

_HERE = Path(__file__).resolve().parent
if not (_HERE / "common").is_dir():
    # A Flower bundle, or a checkout on a file system without symbolic links: the rooms are beside.
    __path__.append(str(_HERE.parent))
