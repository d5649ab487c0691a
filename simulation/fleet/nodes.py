"""How simulated devices are numbered, called and kept, whichever way a round is computed."""

from __future__ import annotations

FIRST_NODE_ID = 1000

# After so many looks that found too few clients, there are rounds in which enough never meet.
MOST_LOOKS = 1000

# The fleet's own entry among the nodes' states in a checkpoint.
GRID = "grid"
