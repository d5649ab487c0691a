"""``healthy.py URL``: exit with 0 if a client's metrics say that it is connected, else with 1.

The health check of the client's image; only Python's own library is needed.
"""

import sys
import urllib.error
import urllib.request

CONNECTED = "headwater_client_is_connected"
SECONDS = 3.0


def is_connected(text: str) -> bool:
    """Tell whether a page in Prometheus' text format says so."""
    rows = (line.split() for line in text.splitlines() if not line.startswith("#"))
    return any(row[0] == CONNECTED and float(row[-1]) == 1 for row in rows if len(row) > 1)


def main() -> int:
    """Ask the address that is the first argument."""
    try:
        with urllib.request.urlopen(sys.argv[1], timeout=SECONDS) as answer:
            page = answer.read().decode()
    except (urllib.error.URLError, TimeoutError) as error:
        print(f"no metrics: {error}", file=sys.stderr)
        return 1
    if is_connected(page):
        return 0
    print("not connected to the server", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
