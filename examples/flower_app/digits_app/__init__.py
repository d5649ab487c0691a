"""A plain Flower app that has adopted exact sums; what changed is marked with ``Headwater:``.

``flwr run .`` beside its pyproject.toml runs it on Flower's own engines, wherever headwater is
installed from its checkout.
"""
