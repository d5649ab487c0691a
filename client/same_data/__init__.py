"""Which data a device has: its part, and a digest of a few examples."""
