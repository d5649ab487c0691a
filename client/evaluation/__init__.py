"""Tests the server's model, or two of them, on the examples that a device holds out."""
