"""Learning that does not end: model versions, logs of bounded size, and the queue of runs."""
