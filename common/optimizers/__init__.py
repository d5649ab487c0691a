"""Optimizers of torch by their names, and the terms of a device's local steps."""
