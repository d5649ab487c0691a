"""Plans each round with pure functions: the cohort, each client's work, and the target batch."""
