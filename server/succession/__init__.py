"""Learning that does not end: model versions, and the queue of runs."""
