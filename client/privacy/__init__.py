"""A device's part in private rounds: its clipped update and the budget that it keeps on disk."""
