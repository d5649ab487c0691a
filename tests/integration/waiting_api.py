"""Waits in ``headwater.serve`` or ``headwater.take_part``, and says when it was interrupted."""

from __future__ import annotations

import sys

import headwater
from tests.python_tasks import Signs


def main() -> None:
    """Call the one or the other, as the command line says, with an address and a folder."""
    side, address, folder = sys.argv[1:]
    try:
        if side == "serve":
            headwater.serve(Signs, listen=address, out=f"{folder}/out")
        else:
            headwater.take_part(Signs, server=address, name="a", state=f"{folder}/state")
    except KeyboardInterrupt:
        print("interrupted", flush=True)


if __name__ == "__main__":
    main()
