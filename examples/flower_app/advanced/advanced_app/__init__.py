"""Flower's advanced-pytorch on the digits; what changed is marked with ``Headwater:``."""
