"""Opens the page of a run: prints its address, and yields the observer that feeds it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from headwater.common.settings.schema import Settings
from headwater.common.system.console import console
from headwater.common.transport.tls import Credentials
from headwater.server.page.page_server import page_of
from headwater.server.page.run_view import RunView
from headwater.server.rounds.observer import Observer
from headwater.server.transport.device_records import DeviceRecords


@contextmanager
def run_page(
    settings: Settings,
    *,
    credentials: Credentials | None = None,
    records: DeviceRecords | None = None,
    stages: Callable[[], Mapping[str, str]] | None = None,
    watch: Callable[[bool], None] | None = None,
) -> Iterator[Observer]:
    """Serve the page of a run that is about to begin, until the block ends.

    Raises:
        PortInUse, InsecureAddress, SettingsError: see ``page_of``.
    """
    assert settings.server.page is not None
    view = RunView(settings, records=records, stages=stages, watch=watch)
    with page_of(view, settings.server.page, credentials) as link:
        console.print(f"page at {link}", soft_wrap=True, markup=False, highlight=False)
        yield view
