"""The settings of an aggregator: its own as a server, and those as a device of the server above."""

from __future__ import annotations

from headwater.common.errors import SettingsError
from headwater.common.settings.introspection import all_settings
from headwater.common.settings.schema import Settings, flattened
from headwater.common.settings.sources import load

OWN = ("task", "threads", "plain_text", "feature.name")
OWN_BRANCHES = ("model.", "tls.", "server.listen", "server.enrolment", "server.staging")
OWN_WAITS = ("cohort.deadline_seconds", "cohort.reconnect_seconds", "cohort.return_seconds")


def check_own(settings: Settings) -> None:
    """Check that only an aggregator's own settings are set: all others are the server's above.

    Raises:
        SettingsError: another one is set.
    """
    default = dict(flattened(Settings().model_dump(mode="json")))
    given = dict(flattened(settings.model_dump(mode="json")))
    for key, value in given.items():
        is_own = key in (*OWN, *OWN_WAITS) or key.startswith((*OWN_BRANCHES, "server.upstream"))
        if is_own or value == default.get(key):
            continue
        setting = all_settings().get(key)
        flag = key if setting is None else setting.name
        raise SettingsError(
            f"{flag} is set, and it is no setting of an aggregator (--upstream)",
            remedy="leave it out; what concerns the run is set at the server above",
        )


def settings_above(settings: Settings) -> Settings:
    """Return the settings with which this server is a device of the server above.

    Raises:
        SettingsError, CertificateProblem: the file of --upstream-config cannot be read.
    """
    server = settings.server
    above = load(server.upstream_config, {"client.server": server.upstream})
    own = {"task": settings.task, "model": settings.model, "threads": settings.threads}
    return above.model_copy(update={**own, "plain_text": settings.plain_text})
