"""A device's check of plans of which two are out at a time."""
