"""Differential privacy: terms of a round, clipping, discrete noise, and what a device spends."""
