"""The commands ``headwater-server init``, ``enroll`` and ``revoke``."""

from __future__ import annotations

import time
from pathlib import Path

import tomli_w

from headwater.common.errors import CertificateProblem, SettingsError
from headwater.common.parsed_text import parse_duration
from headwater.common.settings.sources import load
from headwater.common.system.atomic_file import READABLE, write_atomically
from headwater.common.system.console import console, stderr
from headwater.common.transport.certificates import check_name, fingerprint
from headwater.common.transport.join_token import JoinToken
from headwater.common.transport.tls import is_loopback, split_address
from headwater.common.wording import in_shell
from headwater.server.enrolment.authority import (
    CA_FILE,
    CA_KEY_FILE,
    SERVER_FILE,
    SERVER_KEY_FILE,
    hosts_of,
    is_valid_for,
    make_authority,
    read_certificate,
)
from headwater.server.enrolment.port_address import enrolment_address
from headwater.server.enrolment.token_registry import Registry

SETTINGS_FILE = "server.toml"
STREAM_PORT = 8500
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
# Limits how long an unresponsive device delays a round. The planner gives no client more work than
# fits into 0.8 of it, and reports the clients that it leaves out; most rounds take seconds to
# minutes.
DEADLINE_SECONDS = 600.0


def make_folder(folder: Path, *, hosts: list[str], certificates_last: str | None) -> None:
    """Create the missing files of authority, server certificate, registry and settings; list them.

    Raises:
        CertificateProblem, StateError, SettingsError: see ``make_authority``, ``Registry``.
    """
    lifetime = None if certificates_last is None else parse_duration(certificates_last)
    written = make_authority(folder, hosts=[*hosts, *LOOPBACK_HOSTS])
    had_registry = Registry.is_in(folder)
    with Registry(folder, create=True) as registry:
        if not had_registry:
            written.append(registry.path)
        if lifetime is not None:
            registry.set_fact("certificate_seconds", repr(lifetime))
    settings = folder / SETTINGS_FILE
    is_remote = any(not is_loopback(host) for host in hosts)
    if not settings.exists():
        _write_settings(settings, is_remote=is_remote)
        written.append(settings)
    elif is_remote and '"127.0.0.1:' in settings.read_text(encoding="utf-8"):
        stderr.print(f"{settings} was not changed and listens on 127.0.0.1: change it there")
    for path in written:
        console.print(str(path), soft_wrap=True)
    if not written:
        console.print(f"{folder} is complete: nothing was written")
    console.print("Start the server, then let devices join, with:")
    console.print(
        f"  headwater-server --config {in_shell(settings)} --task my_task.py:MyTask", soft_wrap=True
    )
    console.print(f"  headwater-server enroll NAME --folder {in_shell(folder)}", soft_wrap=True)


def _write_settings(path: Path, *, is_remote: bool) -> None:
    files = {"ca": CA_FILE, "certificate": SERVER_FILE, "key": SERVER_KEY_FILE}
    tree = {
        "server": {"listen": f"{'0.0.0.0' if is_remote else '127.0.0.1'}:{STREAM_PORT}"},
        "cohort": {"deadline_seconds": DEADLINE_SECONDS},
        "tls": {name: str((path.parent / file).resolve()) for name, file in files.items()},
    }
    write_atomically(path, tomli_w.dumps(tree).encode(), mode=READABLE)


def make_token(folder: Path, name: str, *, address: str | None, valid: str) -> str:
    """Return a new join token for a device; the registry stores the hash of its secret.

    Raises:
        SettingsError: the name, the address or the duration is invalid; ``NameTaken``.
        CertificateProblem, StateError: a file that ``init`` made is missing or damaged.
    """
    check_name(name)
    expires_at = int(time.time() + parse_duration(valid))
    ca, server = read_certificate(folder / CA_FILE), read_certificate(folder / SERVER_FILE)
    if not (folder / CA_KEY_FILE).exists():
        raise CertificateProblem(
            f"the authority's {CA_KEY_FILE} is not in {folder}: no device can join",
            remedy="restore it while devices join",
        )
    with Registry(folder) as registry:
        if address is None:
            port = registry.fact("enrolment_port") or _port_to_be(folder / SETTINGS_FILE)
            address = _address(next(iter(hosts_of(server)), "127.0.0.1"), port)
        host, _ = split_address(address)
        if not is_valid_for(server, host):
            raise CertificateProblem(
                f"the server's certificate is not for {host}: no device would trust it",
                remedy=f"`headwater-server init --host {host}`, then restart the server",
            )
        token = JoinToken.new(
            address=address, fingerprint=fingerprint(ca), name=name, expires_at=expires_at
        )
        registry.add_token(name, token.secret_digest, expires_at=expires_at, now=time.time())
    stderr.print(
        f"join token for {name}: valid once, at {address}, until {token.expiry:%Y-%m-%d %H:%M} UTC",
        soft_wrap=True,
    )
    return token.encode()


def revoke_device(folder: Path, name: str) -> None:
    """Revoke all certificates of a name, and void its join token.

    Raises:
        SettingsError: the name has no certificate that is not revoked yet.
        StateError: there is no registry.
    """
    with Registry(folder) as registry:
        num_revoked = registry.revoke(name)
    if not num_revoked:
        raise SettingsError(
            f"{name[:80]!r} has no certificate to revoke: it has not joined, or is revoked "
            "already; its join token, if any, is void",
            remedy="check the name; `headwater-server status` lists the devices of a run",
        )
    console.print(f"{name} is revoked: a running server ends its stream within a second")


def _port_to_be(settings_file: Path) -> str:
    """Return the enrolment port of a server that has not run yet, by the file of its settings.

    Raises:
        SettingsError: the file is wrong, or lets the server take a free port.
    """
    chosen = load(settings_file if settings_file.exists() else None, {}).server
    _, port = split_address(enrolment_address(chosen))
    if port == 0:
        raise SettingsError(
            f"{settings_file} lets the server take a free port, which is not known before it runs",
            remedy="start the server first, or name the address: --address HOST:PORT",
        )
    return str(port)


def _address(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
