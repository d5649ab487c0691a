"""Devices that have the same data, or parts of another division."""
