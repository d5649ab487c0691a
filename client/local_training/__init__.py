"""A client's work in one round: the exact sum of its window, or several local steps."""
