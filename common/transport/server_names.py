"""The names in a server's certificate, for an error of a device that asked for another one."""

from __future__ import annotations

import ssl

from headwater.common.transport.proxy import connect

TIMEOUT_SECONDS = 10.0

# X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
OTHER_NAME = (62, 64)


def names_text(host: str, port: int, context: ssl.SSLContext) -> str:
    """Return for whom the server's certificate was made, as text; it must be of the authority."""
    context.check_hostname = False
    try:
        with (
            connect(host, port, timeout_seconds=TIMEOUT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secure,
        ):
            found = secure.getpeercert() or {}
    except OSError:
        return f"the server's certificate is not for {host}"
    names = [str(row[1]) for row in found.get("subjectAltName", ()) if len(row) == 2]
    return f"the server's certificate is for {', '.join(names)}, not for {host}"


def name_remedy(host: str) -> str:
    """Return what to do about a server's certificate that was made for other names."""
    return (
        f"connect to a name that the certificate has, or let the operator run "
        f"`headwater-server init --host {host}` and restart the server"
    )
