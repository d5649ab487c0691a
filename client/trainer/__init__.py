"""A process's model and gradient vector: checked, measured and trained for its clients."""
