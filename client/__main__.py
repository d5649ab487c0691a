"""``python -m headwater.client``."""

from headwater.client.cli import main

main()
