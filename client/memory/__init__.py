"""Fits training into the device's memory: limits, predicted peaks, activation checkpointing."""
