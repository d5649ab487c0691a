"""Which devices take part in a round, and how much each does."""
