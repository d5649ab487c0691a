"""Sums the gradients of K micro-batches into one vector."""
