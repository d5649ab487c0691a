"""What the operator does about devices: make the authority's folder, let devices in, end them."""

from __future__ import annotations

import ipaddress
import re
import time
from pathlib import Path

import tomli_w
from cryptography import x509

from headwater.common.errors import CertificateProblem, SettingsError
from headwater.common.system.atomic_file import READABLE, write_whole
from headwater.common.system.console import console, stderr
from headwater.common.transport.certificates import check_name, fingerprint
from headwater.common.transport.join_token import JoinToken
from headwater.common.transport.tls import is_loopback, split_address
from headwater.server.enrolment.authority import (
    CA_FILE,
    CA_KEY_FILE,
    SERVER_FILE,
    SERVER_KEY_FILE,
    hosts_of,
    make_authority,
)
from headwater.server.enrolment.registry import Registry

SETTINGS_FILE = "server.toml"
STREAM_PORT, ENROLMENT_PORT = 8500, 8501
OWN_HOSTS = ("localhost", "127.0.0.1", "::1")
MAX_SECONDS = 10 * 365 * 86_400.0
# A device that never answers holds a round no longer. The planner asks nobody for more than can be
# here in 0.8 of it, and says whom it leaves out; most rounds take seconds to minutes.
DEADLINE_SECONDS = 600.0
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def parse_duration(text: str) -> float:
    """Read a length of time: 90s, 30m, 12h, 90d.

    Raises:
        SettingsError: it is none, or longer than ten years.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    seconds = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise SettingsError(
            f"expected a length of time, found {text[:40]!r}", remedy="say 90s, 30m, 12h or 90d"
        )
    return seconds


def make_folder(folder: Path, *, hosts: list[str], certificates_last: str | None) -> None:
    """Make what is missing of authority, server certificate, registry and settings; say what.

    Raises:
        CertificateProblem, StateError, SettingsError: see ``make_authority``, ``Registry``.
    """
    lasts = None if certificates_last is None else parse_duration(certificates_last)
    written = make_authority(folder, hosts=[*hosts, *OWN_HOSTS])
    had_registry = Registry.is_in(folder)
    registry = Registry(folder, make=True)
    if not had_registry:
        written.append(registry.path)
    if lasts is not None:
        registry.state("certificate_seconds", repr(lasts))
    registry.close()
    settings = folder / SETTINGS_FILE
    is_remote = any(not is_loopback(host) for host in hosts)
    if settings.exists():
        if is_remote and '"127.0.0.1:' in settings.read_text():
            stderr.print(f"{settings} is kept as it is, and listens on 127.0.0.1: change it there")
    else:
        listen = f"{'0.0.0.0' if is_remote else '127.0.0.1'}:{STREAM_PORT}"
        files = {"ca": CA_FILE, "certificate": SERVER_FILE, "key": SERVER_KEY_FILE}
        tls = {name: str((folder / file).resolve()) for name, file in files.items()}
        tree = {
            "server": {"listen": listen},
            "cohort": {"deadline_seconds": DEADLINE_SECONDS},
            "tls": tls,
        }
        write_whole(settings, tomli_w.dumps(tree).encode(), mode=READABLE)
        written.append(settings)
    for path in written:
        console.print(str(path), soft_wrap=True)
    if not written:
        console.print(f"{folder} is whole: nothing was made")
    console.print("Start the server, and let devices in, with:")
    console.print(
        f"  headwater-server --config {settings} --task my_task.py:MyTask", soft_wrap=True
    )
    console.print(f"  headwater-server enroll NAME --folder {folder}", soft_wrap=True)


def make_token(folder: Path, name: str, *, address: str | None, valid: str) -> str:
    """Return a new join token for a device, and note the hash of its secret.

    Raises:
        SettingsError: the name, the address or the time is none; ``NameTaken``.
        CertificateProblem, StateError: the folder is not what ``init`` made.
    """
    check_name(name)
    expires_at = int(time.time() + parse_duration(valid))
    ca, server = _certificate(folder / CA_FILE), _certificate(folder / SERVER_FILE)
    if not (folder / CA_KEY_FILE).exists():
        raise CertificateProblem(
            f"the authority's {CA_KEY_FILE} is not in {folder}: nobody can join",
            remedy="put it back while devices join",
        )
    registry = Registry(folder)
    try:
        port = registry.stated("enrolment_port") or str(ENROLMENT_PORT)
        address = address or _joined(next(iter(hosts_of(server)), "127.0.0.1"), port)
        host, _ = split_address(address)
        if not _is_for(server, host):
            raise CertificateProblem(
                f"the server's certificate is not made out for {host}: no device would trust it",
                remedy=f"`headwater-server init --host {host}`, and start the server anew",
            )
        token = JoinToken.new(
            address=address, fingerprint=fingerprint(ca), name=name, expires_at=expires_at
        )
        registry.add_token(name, token.secret_digest, expires_at=expires_at, now=time.time())
    finally:
        registry.close()
    stderr.print(
        f"a join token for {name}: good once, at {address}, until {token.expiry:%Y-%m-%d %H:%M} "
        "UTC",
        soft_wrap=True,
    )
    return token.encode()


def revoke_device(folder: Path, name: str) -> None:
    """End all certificates of a name, and its join token.

    Raises:
        SettingsError: no certificate of the name counts.
        StateError: there is no registry.
    """
    registry = Registry(folder)
    try:
        num_ended = registry.revoke(name)
    finally:
        registry.close()
    if not num_ended:
        raise SettingsError(
            f"no certificate of {name[:80]!r} counts; a join token of the name, if any, is void",
            remedy="check the name",
        )
    console.print(f"{name} is revoked: a running server ends its stream within a second")


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise CertificateProblem(
            f"{path}: {error.strerror}", remedy="make it with `headwater-server init`"
        ) from error
    except ValueError as error:
        raise CertificateProblem(f"{path} is not a certificate") from error


def _joined(host: str, port: str) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_for(server: x509.Certificate, host: str) -> bool:
    try:
        host = str(ipaddress.ip_address(host))
    except ValueError:
        host = host.lower()
    return host in [known.lower() for known in hosts_of(server)]
