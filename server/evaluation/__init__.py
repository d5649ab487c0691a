"""Tests a model on the devices' own examples, in a round that trains nothing."""
