"""``python -m headwater.server``."""

from headwater.server.cli import main

main()
