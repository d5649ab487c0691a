"""The round that measures all examples before training, and what becomes of its result."""
