"""Estimates: straight lines, training speed, gradient noise."""
