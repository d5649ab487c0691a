"""Conversion between our messages and Flower's, and the Grid that our transports share."""
