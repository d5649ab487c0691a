"""Sums what a task measures of a device's examples, and gives the result to its task."""
