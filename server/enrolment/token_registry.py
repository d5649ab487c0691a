"""The registry of certificates and join tokens, one SQLite file next to the authority's files.

The running server and the operator's commands share it between processes: each change is one
transaction, and a reader notices another process's change by ``PRAGMA data_version`` in
microseconds. A certificate that is not in the registry is refused even if the authority signed it.
Of a join token the registry holds only the hash of its secret.
"""

from __future__ import annotations

import datetime as dt
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509

from headwater.common.errors import (
    IdentityRefused,
    JoinTokenExpired,
    JoinTokenUnknown,
    JoinTokenUsed,
    NameTaken,
    StateError,
)
from headwater.common.system.atomic_file import OWNER_ONLY
from headwater.common.transport.certificates import certificate_pem, key_digest, serial_of

REGISTRY_FILE = "registry.sqlite"
BUSY_SECONDS = 2.0
LINGER_SECONDS = 60.0
TOKEN_KEPT_SECONDS = 30 * 86_400.0
DEFAULT_LIFETIME = dt.timedelta(days=365)
SCHEMA = """
CREATE TABLE IF NOT EXISTS certificates (
    serial TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    key BLOB NOT NULL,
    pem BLOB NOT NULL,
    expires_at REAL NOT NULL,
    renews TEXT,
    ended TEXT
);
CREATE INDEX IF NOT EXISTS by_name ON certificates (name);
CREATE INDEX IF NOT EXISTS by_key ON certificates (key);
CREATE INDEX IF NOT EXISTS by_renews ON certificates (renews);
CREATE TABLE IF NOT EXISTS tokens (
    secret BLOB PRIMARY KEY,
    name TEXT NOT NULL,
    expires_at REAL NOT NULL,
    serial TEXT,
    used_at REAL
);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""

Sign = Callable[[], x509.Certificate]


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateEntry:
    """A certificate's entry in the registry."""

    name: str
    renews: str | None
    """Serial of the certificate that this one renews."""
    ended: str | None
    """Why it is invalid, "revoked" or "renewed"; None while it is valid."""


class Registry:
    """The registry in one folder; each thread opens its own, as a context manager or to close."""

    def __init__(self, folder: Path, *, create: bool = False) -> None:
        """Open the registry.

        Raises:
            StateError: it does not exist, or cannot be read and written.
        """
        self.path = folder / REGISTRY_FILE
        try:
            if create:
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, OWNER_ONLY))
            self._database = sqlite3.connect(
                f"{self.path.resolve().as_uri()}?mode=rw",
                uri=True,
                timeout=BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            try:
                with self._state_errors():
                    self._database.executescript(SCHEMA)
            except BaseException:
                self._database.close()
                raise
        except (OSError, sqlite3.Error) as error:
            raise StateError(
                f"the registry of certificates {self.path}: {error}",
                remedy="create one with `headwater-server init`, and let the server write to it",
            ) from error
        self._version = -1

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Return whether a folder has a registry."""
        return (folder / REGISTRY_FILE).exists()

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Called by the operator's commands.

    def add_token(self, name: str, secret_digest: bytes, *, expires_at: float, now: float) -> None:
        """Let a device of this name join once; an unused earlier token of the name becomes void.

        Raises:
            NameTaken: the name has a valid certificate.
        """
        with self._transaction() as database:
            self._check_free(name, now)
            database.execute("DELETE FROM tokens WHERE name = ? AND serial IS NULL", (name,))
            database.execute("DELETE FROM tokens WHERE expires_at < ?", (now - TOKEN_KEPT_SECONDS,))
            database.execute(
                "INSERT INTO tokens (secret, name, expires_at) VALUES (?, ?, ?)",
                (secret_digest, name, expires_at),
            )

    def revoke(self, name: str) -> int:
        """Revoke a name's certificates and void its token; return how many were revoked."""
        with self._transaction() as database:
            database.execute("DELETE FROM tokens WHERE name = ?", (name,))
            return database.execute(
                "UPDATE certificates SET ended = 'revoked' "
                "WHERE name = ? AND ended IS NOT 'revoked'",
                (name,),
            ).rowcount

    def set_fact(self, fact: str, value: str) -> None:
        """Store a fact that the commands and the server share, such as the enrolment port."""
        with self._transaction() as database:
            database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (fact, value))

    def fact(self, fact: str) -> str | None:
        """Return a fact, or None if it was never set."""
        row = self._row("SELECT value FROM facts WHERE name = ?", (fact,))
        return None if row is None else str(row[0])

    @property
    def certificate_lifetime(self) -> dt.timedelta:
        """How long a device's certificate is valid."""
        seconds = self.fact("certificate_seconds")
        return DEFAULT_LIFETIME if seconds is None else dt.timedelta(seconds=float(seconds))

    # Called by the enrolment port.

    def has_open_token(self, now: float) -> bool:
        """Return whether a token is valid, and unused or used within the last minute.

        A device that has just joined may ask again, because the server's answer may be lost.
        """
        sql = "SELECT 1 FROM tokens WHERE expires_at >= ? AND (serial IS NULL OR used_at >= ?)"
        return self._row(sql, (now, now - LINGER_SECONDS)) is not None

    def redeem(
        self, secret_digest: bytes, name: str, key: bytes, *, now: float, sign: Sign
    ) -> bytes:
        """Use a token: sign and register one certificate; return it in PEM.

        A device with the same key may repeat the request until the token expires, and gets the same
        certificate: the first answer may have been lost.

        Raises:
            JoinTokenUnknown: there is no such token, or it is for another name.
            JoinTokenExpired: it has expired.
            JoinTokenUsed: it was used with another key.
            NameTaken: the name has a valid certificate.
            IdentityRefused: the key belongs to another certificate.
        """
        with self._transaction() as database:
            row = database.execute(
                "SELECT t.name, t.expires_at, t.serial, c.key, c.pem, c.ended FROM tokens t "
                "LEFT JOIN certificates c ON c.serial = t.serial WHERE t.secret = ?",
                (secret_digest,),
            ).fetchone()
            if row is None or row[0] != name:
                raise JoinTokenUnknown(f"there is no such join token for {name}")
            _, expires_at, serial, used_key, pem, ended = row
            if expires_at < now:
                expiry = dt.datetime.fromtimestamp(expires_at, dt.UTC)
                raise JoinTokenExpired(
                    f"the join token of {name} expired {expiry:%Y-%m-%d %H:%M} UTC"
                )
            if serial is not None:
                if used_key == key and ended is None:
                    return bytes(pem)
                raise JoinTokenUsed(f"the join token of {name} was already used with another key")
            self._check_free(name, now)
            certificate = sign()
            self._insert(name, key, certificate, renews=None)
            database.execute(
                "UPDATE tokens SET serial = ?, used_at = ? WHERE secret = ?",
                (serial_of(certificate), now, secret_digest),
            )
            return certificate_pem(certificate)

    # Called for a device's stream.

    def entry(self, serial: str) -> CertificateEntry | None:
        """Return a certificate's entry, or None if the registry does not have it."""
        row = self._row("SELECT name, renews, ended FROM certificates WHERE serial = ?", (serial,))
        return None if row is None else CertificateEntry(name=row[0], renews=row[1], ended=row[2])

    def renew(self, serial: str, name: str, key: bytes, *, sign: Sign) -> bytes:
        """Sign and register a certificate's successor; an unused earlier successor is deleted.

        Raises:
            IdentityRefused: the certificate is not valid, or the key belongs to another one.
        """
        with self._transaction() as database:
            row = database.execute(
                "SELECT name FROM certificates WHERE serial = ? AND ended IS NULL", (serial,)
            ).fetchone()
            if row is None or row[0] != name:
                raise IdentityRefused(f"{name}: only a valid certificate can be renewed")
            # The first use of a successor ends its predecessor, so any found here is unused.
            database.execute("DELETE FROM certificates WHERE renews = ?", (serial,))
            certificate = sign()
            self._insert(name, key, certificate, renews=serial)
            return certificate_pem(certificate)

    def end_renewed(self, serial: str) -> None:
        """End a certificate whose successor has been used."""
        with self._transaction() as database:
            database.execute(
                "UPDATE certificates SET ended = 'renewed' WHERE serial = ? AND ended IS NULL",
                (serial,),
            )

    def has_changed(self) -> bool:
        """Return whether another process or thread has changed it since the last call."""
        row = self._row("PRAGMA data_version", ())
        assert row is not None
        before, self._version = self._version, int(row[0])
        return before != self._version

    def look_again(self) -> None:
        """Let the next ``has_changed`` return True: what changed could not be read."""
        self._version = -1

    def _check_free(self, name: str, now: float) -> None:
        sql = "SELECT 1 FROM certificates WHERE name = ? AND ended IS NULL AND expires_at >= ?"
        if self._row(sql, (name, now)) is not None:
            raise NameTaken(f"{name} already has a valid certificate")

    def _insert(
        self, name: str, key: bytes, certificate: x509.Certificate, *, renews: str | None
    ) -> None:
        assert key == key_digest(certificate.public_key())
        if self._row("SELECT 1 FROM certificates WHERE key = ?", (key,)) is not None:
            raise IdentityRefused(
                f"{name}: this key already has, or had, a certificate",
                remedy="make a new key: remove the device's files and join again",
            )
        serial, pem = serial_of(certificate), certificate_pem(certificate)
        expires_at = certificate.not_valid_after_utc.timestamp()
        self._database.execute(
            "INSERT INTO certificates (serial, name, key, pem, expires_at, renews) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (serial, name, key, pem, expires_at, renews),
        )

    def _row(self, sql: str, values: tuple[object, ...]) -> tuple[Any, ...] | None:
        with self._state_errors():
            row: tuple[Any, ...] | None = self._database.execute(sql, values).fetchone()
            return row

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Change all or nothing, with exclusive write access."""
        with self._state_errors():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield self._database
            except BaseException:
                self._database.execute("ROLLBACK")
                raise
            self._database.execute("COMMIT")

    @contextmanager
    def _state_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StateError(f"the registry of certificates {self.path}: {error}") from error
