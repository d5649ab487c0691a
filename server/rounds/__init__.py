"""One round from its plans to its checkpoint."""
