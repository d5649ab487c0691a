"""Compares saved models whose records differ because their runs had other settings."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open


def tensor_bytes(file: Path) -> dict[str, bytes]:
    """Return the bytes of each tensor of a model, without the record."""
    with safe_open(file, "numpy") as opened:
        return {name: opened.get_tensor(name).tobytes() for name in opened.keys()}  # noqa: SIM118
