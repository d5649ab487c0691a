"""``python -m headwater.simulation``."""

from headwater.simulation.cli import main

main()
