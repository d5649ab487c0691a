"""Secure aggregation: the messages and the mathematics that clients and server share."""
