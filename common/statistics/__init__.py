"""Counts, means and histograms of all examples: what a task measures, and the sums of it."""
