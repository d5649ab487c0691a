"""Trains on the client: sums the gradients of K micro-batches into one vector."""
