"""Data sets: partitions, shares, micro-batches, and the check that a loss is a sum."""
