"""Certificates of devices and server: the authority, the registry, and the operator's commands."""
