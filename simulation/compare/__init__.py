"""Compares algorithms on the user's task and fleet, at equal cost."""
