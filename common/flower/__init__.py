"""The bridge between our messages and Flower's."""
