"""Each device's share of the weight of a run's rounds, from rows of rounds.jsonl.

Of masked and private rounds the server knows no device's weight: the examples of the plans stand
for it, which the server chose itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from headwater.server.rounds.round_row import column_of


def weight_shares(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, float]]:
    """Return the devices' names and shares of all weight, the largest first; they add up to 1.

    Without any weight all shares are 0.
    """
    weights: defaultdict[str, float] = defaultdict(float)
    for row in rows:
        clients = row["clients"]
        for name, own in zip(column_of(clients, "name"), column_of(clients, "weight"), strict=True):
            weights[name] += own
        for client in row.get("masked_clients", []):
            weights[client["name"]] += client["planned_examples"]
    total = math.fsum(weights.values()) or 1.0
    found = [(name, weight / total) for name, weight in weights.items()]
    return sorted(found, key=lambda one: -one[1])
