"""Tells the operator of trouble, by a URL or a command, and when it is over."""
