"""Flower's quickstart for PyTorch, on the digits; what changed is marked with ``Headwater:``.

``flwr run .`` beside its pyproject.toml runs it on Flower's own engines, wherever headwater is
installed.
"""
