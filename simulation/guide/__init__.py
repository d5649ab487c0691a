"""The guide: accumulation, the planner and masks, to play with on real computations."""
