"""Where the enrolment port listens, by the settings: by default at the port after the devices'."""

from __future__ import annotations

from headwater.common.settings.schema import ServerSettings
from headwater.common.transport.tls import split_address


def enrolment_address(chosen: ServerSettings) -> str:
    """Return HOST:PORT of the enrolment port; port 0 means a free one.

    Raises:
        SettingsError: ``listen`` is not HOST:PORT.
    """
    if chosen.enrolment_listen is not None:
        return chosen.enrolment_listen
    host, port = split_address(chosen.listen)
    return f"[{host}]:{port + 1 if port else 0}"
