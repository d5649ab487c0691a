"""Adds up the updates, divides once by their weight, and takes the optimizer's step."""
