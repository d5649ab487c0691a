"""Follows metrics over a run: the best model, and when to stop early."""
