"""Opens the page of a run: prints its address, and yields the observer that feeds it.

After the end of a run the page stays up for whoever looks at it: in a terminal until Ctrl-C.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import click

from headwater.common.settings.schema import Settings
from headwater.common.system.console import console
from headwater.common.transport.tls import Credentials
from headwater.common.wording import duration_text
from headwater.server.page.page_server import page_of
from headwater.server.page.run_view import RunView
from headwater.server.transport.device_records import DeviceRecords


@contextmanager
def run_page(
    settings: Settings,
    *,
    credentials: Credentials | None = None,
    records: DeviceRecords | None = None,
    stages: Callable[[], Mapping[str, str]] | None = None,
    watch: Callable[[bool], None] | None = None,
) -> Iterator[RunView]:
    """Serve the page of a run that is about to begin, until the block ends.

    If it ends without an error, and ``may_stay`` of the yielded observer is not False by then, the
    page stays up as ``server.page_stays_seconds`` says.

    Raises:
        PortInUse, InsecureAddress, SettingsError: see ``page_of``.
    """
    assert settings.server.page is not None
    view = RunView(settings, records=records, stages=stages, watch=watch)
    with page_of(view, settings.server.page, credentials) as link:
        console.print(f"page at {link}", soft_wrap=True, markup=False, highlight=False)
        yield view
        if view.may_stay:
            _stay(link, settings.server.page_stays_seconds)


def _stay(link: str, chosen_seconds: float | None) -> None:
    """Wait until the page may go."""
    seconds = chosen_seconds
    if seconds is None:
        seconds = math.inf if _is_in_terminal() else 0.0
    if not seconds:
        return
    until = (
        "until Ctrl-C" if seconds == math.inf else f"for {duration_text(seconds)}, or until Ctrl-C"
    )
    text = f"the run has ended; the page stays at {link} {until}; then the summary follows"
    console.print(text, soft_wrap=True, markup=False, highlight=False)
    with suppress(KeyboardInterrupt):
        threading.Event().wait(None if seconds == math.inf else seconds)


def _is_in_terminal() -> bool:
    """Whether a person has started a command; a call of the Python API returns at the run's end."""
    is_command = click.get_current_context(silent=True) is not None
    return is_command and all(one is not None and one.isatty() for one in (sys.stdin, sys.stdout))
