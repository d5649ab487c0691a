"""Estimates from measurements: straight lines, training speed, gradient noise."""
