"""Robust rules in the place of the mean: median, trimmed mean, Krum, clipping."""
