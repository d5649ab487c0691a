"""What the owner of a device looks at: checks, counters, metrics."""
