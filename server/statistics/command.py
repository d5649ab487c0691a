"""``headwater-server statistics``: the round that measures, alone, and its result as a table."""

from __future__ import annotations

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import default_out
from headwater.common.system.console import print_table, print_text
from headwater.common.transport.tls import Credentials
from headwater.common.wording import in_shell
from headwater.server.run_sequence import serve_runs
from headwater.server.statistics.advice import as_table, read_statistics


def measure(settings: Settings, credentials: Credentials | None) -> None:
    """Serve one round of statistics, and print what it found.

    Raises:
        SettingsError: the settings are those of an aggregator, or of a run with a standby.
        HeadwaterError: see ``serve_runs``.
    """
    if settings.server.upstream is not None or settings.standby.shared_state is not None:
        raise SettingsError(
            "statistics are measured by a server of its own, without a standby",
            remedy="leave out --upstream and --shared-state",
        )
    out = settings.out or default_out(settings)
    serve_runs(settings.model_copy(update={"out": out}), credentials, resume=False)
    print_table(as_table(read_statistics(out)))
    print_text(f"to train with them: headwater-server --resume --out {in_shell(out)} --rounds N")
