"""Windows that a device sums while it has no link, and their file."""
