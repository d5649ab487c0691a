"""A device's signing identity and allow-list, which active secure aggregation needs.

The identity's file holds only a private key, and only its owner may read it; the identity's name is
the device's. The allow-list is a file of names and public keys that reaches the device without
passing through the server (``common.secagg.identity``).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from headwater.common.errors import IdentityProblem
from headwater.common.secagg.identity import AllowList, SigningIdentity
from headwater.common.settings.schema import SecureSettings
from headwater.common.transport.trusted_file import UntrustedFile, read_trusted


@dataclass(frozen=True, kw_only=True, slots=True)
class Enrolment:
    """A device's identity and allow-list; it needs both to take part in active sessions."""

    identity: SigningIdentity | None = None
    allow_list: AllowList | None = None

    def check(self, name: str) -> None:
        """Check that the device can take part in active sessions.

        Raises:
            IdentityProblem: one is missing, or the allow-list does not contain the identity.
        """
        if self.identity is None or self.allow_list is None:
            missing = "--identity" if self.identity is None else "--allow-list"
            raise IdentityProblem(
                f"{name}: active secure aggregation needs {missing} FILE",
                remedy="make the identity with `headwater-client identity`; the allow-list is a "
                "file with the lines that this command prints on all devices",
            )
        listed = self.allow_list.keys
        if listed.get(name) == self.identity.public_key:
            return
        others = [other for other, key in listed.items() if key == self.identity.public_key]
        if others:
            raise IdentityProblem(
                f"{name}: the allow-list has this identity under the name {others[0]}",
                remedy=f"start the device with --name {others[0]}",
            )
        entry = "another key under this name" if name in listed else "no entry for this device"
        raise IdentityProblem(
            f"{name}: the allow-list has {entry}",
            remedy="put the line that `headwater-client identity` prints into the allow-list of "
            "every device",
        )


@functools.cache
def read_enrolment(name: str, *, identity: Path | None, allow_list: Path | None) -> Enrolment:
    """Read the files once per process; a changed allow-list takes effect at the next start.

    Raises:
        IdentityProblem: a file cannot be read, or has other content.
    """
    return Enrolment(
        identity=None if identity is None else read_identity(identity, name),
        allow_list=None if allow_list is None else _read_allow_list(allow_list),
    )


def check_enrolment(chosen: SecureSettings, name: str) -> None:
    """Check the files that the settings name, before the first session needs them.

    Raises:
        IdentityProblem: a file has other content, or active mode lacks one.
    """
    enrolment = read_enrolment(name, identity=chosen.identity, allow_list=chosen.allow_list)
    if chosen.aggregation == "active":
        enrolment.check(name)


def make_identity(path: Path, name: str) -> tuple[SigningIdentity, bool]:
    """Return the identity in a file, made if there is none, and whether it is new.

    Raises:
        IdentityProblem: the file cannot be written, or has other content.
    """
    identity = SigningIdentity.new(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return read_identity(path, name), False
    except OSError as error:
        raise IdentityProblem(f"{path} cannot be written: {error.strerror}") from error
    try:
        with open(descriptor, "wb") as file:
            file.write(identity.to_pem())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        with contextlib.suppress(OSError):
            path.unlink()
        raise IdentityProblem(f"{path} cannot be written: {error.strerror}") from error
    return identity, True


def read_identity(path: Path, name: str) -> SigningIdentity:
    """Read an identity's file.

    Raises:
        IdentityProblem: the file cannot be read, users other than its owner may read or write it
            (``common.transport.trusted_file``), or it holds no Ed25519 key.
    """
    try:
        pem = read_trusted(path, is_secret=True)
    except UntrustedFile as error:
        raise IdentityProblem(
            f"{path}: {error.strerror}",
            remedy="make a new identity if somebody may have read this one",
        ) from error
    except OSError as error:
        raise IdentityProblem(f"{path} cannot be read: {error.strerror}") from error
    try:
        return SigningIdentity.from_pem(name, pem)
    except IdentityProblem as error:
        raise IdentityProblem(f"{path}: {error}", remedy=error.remedy) from error


def _read_allow_list(path: Path) -> AllowList:
    try:
        return AllowList.parse(read_trusted(path).decode())
    except OSError as error:
        raise IdentityProblem(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise IdentityProblem(f"{path} is no allow-list: it is not text") from error
    except IdentityProblem as error:
        raise IdentityProblem(f"{path}: {error}", remedy=error.remedy) from error


# Simulated identities. One party runs all clients in a simulation, so nothing is protected.


def simulated_enrolment(name: str) -> Enrolment:
    """Return a simulated client's identity, the same in every process, and a list of all."""
    return Enrolment(identity=_simulated_identity(name), allow_list=AllowList(_SimulatedKeys()))


@functools.cache
def _simulated_identity(name: str) -> SigningIdentity:
    return SigningIdentity.from_seed(name, hashlib.sha256(f"simulated {name}".encode()).digest())


class _SimulatedKeys(Mapping[str, bytes]):
    """The public keys of all simulated clients, derived from their names on demand."""

    def __getitem__(self, name: str) -> bytes:
        return _simulated_identity(name).public_key

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0
