"""Flower's fl-tabular on the breast cancer table; what changed is marked with ``Headwater:``."""
