"""Simulated devices on the machines of a Ray cluster."""
