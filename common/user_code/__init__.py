"""Finds and imports what users write, tasks first, and shows where their code has failed."""
