"""Runs with the devices of some labels alone."""
