"""The registry: which certificates the authority signed, which are revoked, which tokens are out.

One SQLite file beside the authority's. The running server and the commands of the operator are
several processes that share it: each change is one transaction, and a reader notices that another
process has changed something by ``PRAGMA data_version``, which costs microseconds. A certificate
that is not in the registry is nobody's: with the registry in place a device is let in by what
stands here, and not by a signature alone. Of a join token it holds the hash of its secret.
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
from headwater.common.transport.certificates import certificate_pem, key_digest

REGISTRY_FILE = "registry.sqlite"
BUSY_SECONDS = 2.0
LINGER_SECONDS = 60.0
DEFAULT_LASTS = dt.timedelta(days=365)
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
    """What the registry says of one certificate."""

    name: str
    renews: str | None
    ended: str | None
    """Why it counts no more: "revoked" or "renewed"; None while it counts."""


class Registry:
    """The registry in one folder; each thread opens its own."""

    def __init__(self, folder: Path, *, make: bool = False) -> None:
        """Open the registry, or make it.

        Raises:
            StateError: it is not there, or cannot be read and written.
        """
        self.path = folder / REGISTRY_FILE
        try:
            if make:
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT, OWNER_ONLY))
            self._base = sqlite3.connect(
                f"{self.path.resolve().as_uri()}?mode=rw",
                uri=True,
                timeout=BUSY_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
            with self._shown():
                self._base.executescript(SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StateError(
                f"the registry of certificates {self.path}: {error}",
                remedy="make one with `headwater-server init`, and let the server write to it",
            ) from error
        self._version = -1

    @staticmethod
    def is_in(folder: Path) -> bool:
        """Tell whether a folder has a registry."""
        return (folder / REGISTRY_FILE).exists()

    def close(self) -> None:
        """Close the file."""
        self._base.close()

    # What the operator's commands do.

    def add_token(self, name: str, secret_digest: bytes, *, expires_at: float, now: float) -> None:
        """Let a device of this name join once; an earlier token of the name is void.

        Raises:
            NameTaken: a certificate of this name counts.
        """
        with self._change() as base:
            if self._holders(base, name, now):
                raise NameTaken(f"{name} has a certificate that counts")
            base.execute("DELETE FROM tokens WHERE name = ? AND serial IS NULL", (name,))
            base.execute("DELETE FROM tokens WHERE expires_at < ?", (now - 30 * 86_400,))
            base.execute(
                "INSERT INTO tokens (secret, name, expires_at) VALUES (?, ?, ?)",
                (secret_digest, name, expires_at),
            )

    def revoke(self, name: str) -> int:
        """Revoke all certificates of a name and void its token; return how many were revoked."""
        with self._change() as base:
            base.execute("DELETE FROM tokens WHERE name = ?", (name,))
            return base.execute(
                "UPDATE certificates SET ended = 'revoked' "
                "WHERE name = ? AND ended IS NOT 'revoked'",
                (name,),
            ).rowcount

    def state(self, fact: str, value: str) -> None:
        """Note a fact of the enrolment: how long certificates last, which ports are open."""
        with self._change() as base:
            base.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (fact, value))

    def stated(self, fact: str) -> str | None:
        """Return a fact, None if it was never stated."""
        row = self._row("SELECT value FROM facts WHERE name = ?", (fact,))
        return None if row is None else str(row[0])

    @property
    def lasts(self) -> dt.timedelta:
        """How long a device's certificate lasts."""
        seconds = self.stated("certificate_seconds")
        return DEFAULT_LASTS if seconds is None else dt.timedelta(seconds=float(seconds))

    # What the enrolment port does.

    def has_open_token(self, now: float) -> bool:
        """Tell whether anybody may join now, or has joined just now: its answer may be lost."""
        sql = "SELECT 1 FROM tokens WHERE expires_at >= ? AND (serial IS NULL OR used_at >= ?)"
        return self._row(sql, (now, now - LINGER_SECONDS)) is not None

    def redeem(
        self, secret_digest: bytes, name: str, key: bytes, *, now: float, sign: Sign
    ) -> bytes:
        """Use a token: sign and note one certificate; return it in PEM.

        The same device, known by its key, may ask again while the token has not expired, and gets
        the same certificate: the answer may have been lost on its way.

        Raises:
            JoinTokenUnknown: no such token, or for another name.
            JoinTokenExpired, JoinTokenUsed: as they say.
            NameTaken: a certificate of the name counts.
            IdentityRefused: the key was another certificate's.
        """
        with self._change() as base:
            row = base.execute(
                "SELECT t.name, t.expires_at, t.serial, c.key, c.pem, c.ended FROM tokens t "
                "LEFT JOIN certificates c ON c.serial = t.serial WHERE t.secret = ?",
                (secret_digest,),
            ).fetchone()
            if row is None or row[0] != name:
                raise JoinTokenUnknown(f"no join token of this kind was made for {name}")
            _, expires_at, serial, used_by, pem, ended = row
            if expires_at < now:
                past = dt.datetime.fromtimestamp(expires_at, dt.UTC)
                raise JoinTokenExpired(
                    f"the join token of {name} expired {past:%Y-%m-%d %H:%M} UTC"
                )
            if serial is not None:
                if used_by == key and ended is None:
                    return bytes(pem)
                raise JoinTokenUsed(f"the join token of {name} was used before, with another key")
            if self._holders(base, name, now):
                raise NameTaken(f"{name} has a certificate that counts")
            certificate = sign()
            self._note(base, name, key, certificate, renews=None)
            base.execute(
                "UPDATE tokens SET serial = ?, used_at = ? WHERE secret = ?",
                (serial_of(certificate), now, secret_digest),
            )
            return certificate_pem(certificate)

    # What the stream does.

    def entry(self, serial: str) -> CertificateEntry | None:
        """Return what is known of a certificate, None if it was never signed here."""
        row = self._row("SELECT name, renews, ended FROM certificates WHERE serial = ?", (serial,))
        return None if row is None else CertificateEntry(name=row[0], renews=row[1], ended=row[2])

    def renew(self, serial: str, name: str, key: bytes, *, sign: Sign) -> bytes:
        """Sign and note the successor of a certificate; one that was never used is forgotten.

        Raises:
            IdentityRefused: the certificate counts no more, or the key was another's.
        """
        with self._change() as base:
            row = base.execute(
                "SELECT name FROM certificates WHERE serial = ? AND ended IS NULL", (serial,)
            ).fetchone()
            if row is None or row[0] != name:
                raise IdentityRefused(f"{name}: a certificate that counts no more is not renewed")
            # A used one has ended its predecessor, so what is found here was never used.
            base.execute("DELETE FROM certificates WHERE renews = ?", (serial,))
            certificate = sign()
            self._note(base, name, key, certificate, renews=serial)
            return certificate_pem(certificate)

    def supersede(self, serial: str) -> None:
        """End a certificate whose successor has been used."""
        with self._change() as base:
            base.execute(
                "UPDATE certificates SET ended = 'renewed' WHERE serial = ? AND ended IS NULL",
                (serial,),
            )

    def has_changed(self) -> bool:
        """Tell whether another process, or thread, has changed anything since the last call."""
        row = self._row("PRAGMA data_version", ())
        assert row is not None
        before, self._version = self._version, int(row[0])
        return before != self._version

    def _holders(self, base: sqlite3.Connection, name: str, now: float) -> bool:
        sql = "SELECT 1 FROM certificates WHERE name = ? AND ended IS NULL AND expires_at >= ?"
        return base.execute(sql, (name, now)).fetchone() is not None

    def _note(
        self,
        base: sqlite3.Connection,
        name: str,
        key: bytes,
        certificate: x509.Certificate,
        *,
        renews: str | None,
    ) -> None:
        assert key == key_digest(certificate.public_key())
        known = base.execute("SELECT 1 FROM certificates WHERE key = ?", (key,)).fetchone()
        if known is not None:
            raise IdentityRefused(
                f"{name}: this key has, or had, a certificate already",
                remedy="make a new key: remove the device's files and join again",
            )
        base.execute(
            "INSERT INTO certificates (serial, name, key, pem, expires_at, renews) "
            "VALUES (?, ?, ?, ?, ?, ?)",
            (
                serial_of(certificate),
                name,
                key,
                certificate_pem(certificate),
                certificate.not_valid_after_utc.timestamp(),
                renews,
            ),
        )

    def _row(self, sql: str, values: tuple[object, ...]) -> tuple[Any, ...] | None:
        with self._shown():
            row: tuple[Any, ...] | None = self._base.execute(sql, values).fetchone()
            return row

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """Change all or nothing; nobody else changes anything meanwhile."""
        with self._shown():
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield self._base
            except BaseException:
                self._base.execute("ROLLBACK")
                raise
            self._base.execute("COMMIT")

    @contextmanager
    def _shown(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise StateError(f"the registry of certificates {self.path}: {error}") from error


def serial_of(certificate: x509.Certificate) -> str:
    """Return a certificate's serial number as the registry writes it: it has up to 159 bits."""
    return f"{certificate.serial_number:x}"
