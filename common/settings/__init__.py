"""Every setting, its sources, and the flags made from it."""
