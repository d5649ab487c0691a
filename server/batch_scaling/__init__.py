"""The learning rate follows the batch: by the examples that a round gathered."""
