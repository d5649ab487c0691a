"""Checks on a few real examples, before the first round, that what a task returns is a sum."""
