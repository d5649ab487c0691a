"""The client: sums the gradients of its own examples and sends one vector."""
