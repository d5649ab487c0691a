"""Data sets: how they are partitioned among clients, batched, and tested on."""
