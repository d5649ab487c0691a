"""The frozen part of a model on a device: taken, kept and required."""
