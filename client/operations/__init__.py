"""Tools for a device's owner: checks, counters and metrics."""
