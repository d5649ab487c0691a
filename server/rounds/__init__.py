"""Runs the rounds from the plans to the committed step, and stores checkpoints."""
