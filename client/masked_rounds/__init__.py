"""Masked rounds on a device: from a plan to the phases of its secure session."""
