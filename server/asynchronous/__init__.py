"""Asynchronous rounds: a step whenever a buffer of updates is full, whichever model they are of."""
