"""Encodings of updates and models in fewer bytes: rounding, and sending a part of a vector."""
