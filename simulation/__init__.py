"""Many clients on one machine, under a virtual clock; the only package that imports both sides."""
