"""Adds updates, divides once, and takes the step."""
