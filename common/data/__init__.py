"""Data sets: how they are partitioned among clients, batched, and checked for an additive loss."""
