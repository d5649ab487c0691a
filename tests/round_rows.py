"""Rounds as they stand in rounds.jsonl, for tests of what is done with them."""

from __future__ import annotations

from typing import Any

from headwater.server.rounds.round_row import ClientRow, MaskedClientRow, RoundRow


def client(name: str, **changes: Any) -> ClientRow:
    """Return a device's part: two micro-batches of 3 in a second, at 100 bytes."""
    plain: dict[str, Any] = {
        "name": name,
        "accumulation_steps": 2,
        "micro_batch_size": 3,
        "num_examples": 6,
        "num_refused": 0,
        "weight": 6,
        "seconds": 1.0,
        "loss": 0.5,
        "step_seconds": [0.5, 0.5],
        "step_loss": [0.5, 0.5],
        "step_gradient_norm": [1.0, 1.5],
        "gradient_variance": [None, None],
        "peak_bytes": 100,
        "reason": "quota",
        "plan": "as set",
    }
    return ClientRow(**{**plain, **changes})


def masked(name: str) -> MaskedClientRow:
    """Return a device's part in a masked round, of which 5 micro-batches were planned."""
    return MaskedClientRow(
        name=name,
        planned_steps=5,
        planned_micro_batch_size=4,
        planned_examples=20,
        seconds=2.0,
        plan="as set",
    )


def row(round_number: int, *names: str, **changes: Any) -> RoundRow:
    """Return a round of these devices, of 6 examples each, in 3 s of which 1 s was waited."""
    plain: dict[str, Any] = {
        "round": round_number,
        "num_clients": len(names),
        "num_invited": len(names),
        "num_examples": 6 * len(names),
        "weight": 6 * len(names),
        "loss": 0.5,
        "metrics": {"test_accuracy": 0.75},
        "learning_rate": 0.1,
        "seconds": 3.0,
        "seconds_split": {"wait": 1.0, "train": 2.0},
        "slowest_client_seconds": 1.0,
        "updates_per_hour": 100.0,
        "bytes_up": 10,
        "bytes_down": 20,
        "num_scale_shifts": 0,
        "clients": [client(name) for name in names],
    }
    return RoundRow(**{**plain, **changes})
