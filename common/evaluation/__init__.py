"""Tests of a model on the devices' own examples: what a task counts of its predictions, as sums."""
