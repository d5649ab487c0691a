"""The page of a run: the fleet and the training, live in a browser."""
