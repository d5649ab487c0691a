"""Many clients on one machine, under a virtual clock."""
