"""Passes over the examples of many devices at once: their sums, their norms, their local steps."""
