"""Retries of a broken connection: how long to wait, when to give up, and what may be wrong."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Collection

from headwater.common.errors import ConnectionLost, CorruptUpdate
from headwater.common.transport.proxy import proxy_of, proxy_remedy
from headwater.common.transport.tls import split_address

FIRST_BACKOFF_SECONDS = 0.2
MAX_BACKOFF_SECONDS = 30.0
# With a standby, which may have taken over in the meantime.
STANDBY_BACKOFF_SECONDS = 4.0
# Corrupt models in a row: a flipped bit comes alone, a lying server repeats itself.
MAX_CORRUPT_MODELS = 4
SAY_AGAIN_SECONDS = 60.0
PORT = re.compile(r":\d+")
# gRPC's words when a server that expects a TLS handshake ends a connection in plain text.
CLOSED = ("Socket closed", "Connection reset")


class ConnectionBroken(Exception):
    """The connection broke; another one may succeed."""

    def __init__(self, text: str, *, had_contact: bool, is_corrupt: bool = False) -> None:
        super().__init__(text)
        self.had_contact = had_contact
        self.is_corrupt = is_corrupt


class TaskChanges:
    """Decides how long a device waits before it connects with another of its tasks.

    Servers that each have another task would otherwise make it load one after the other without
    a pause.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def wait_seconds(self, *, has_trained: bool) -> float:
        """Return the wait: none after a task that the device has trained, and at the first change.

        It doubles with each further change, up to ``MAX_BACKOFF_SECONDS``.
        """
        seconds = 0.0 if has_trained else self._seconds
        self._seconds = min(max(2 * seconds, FIRST_BACKOFF_SECONDS), MAX_BACKOFF_SECONDS)
        return seconds


class RetryPolicy:
    """Decides how long to wait before the next connection, and when to give up."""

    def __init__(
        self, addresses: Collection[str], patience_seconds: float, *, has_tls: bool
    ) -> None:
        self._address = " or ".join(addresses)
        self._hosts = [split_address(address)[0] for address in addresses]
        has_standby = len(addresses) > 1
        self._max_backoff = STANDBY_BACKOFF_SECONDS if has_standby else MAX_BACKOFF_SECONDS
        self._patience_seconds = patience_seconds
        self._has_tls = has_tls
        self._num_corrupt = 0
        self._had_contact = False
        self._said, self._said_at = "", 0.0
        self.reset()

    def reset(self) -> None:
        """Start over, as if the last contact were now."""
        self._backoff_seconds = FIRST_BACKOFF_SECONDS
        self._last_contact = time.monotonic()

    def wait_seconds(self, broken: ConnectionBroken) -> float:
        """Return a random wait; it doubles with each failure, up to ``MAX_BACKOFF_SECONDS``.

        With several addresses it stays below ``STANDBY_BACKOFF_SECONDS``.

        A contact resets it, unless the model was corrupt: each such retry costs a whole model.

        Raises:
            CorruptUpdate: ``MAX_CORRUPT_MODELS`` in a row were corrupt.
            ConnectionLost: the last contact was ``patience_seconds`` ago.
        """
        self._had_contact |= broken.had_contact
        if broken.had_contact:
            self._last_contact = time.monotonic()
            if not broken.is_corrupt:
                self._backoff_seconds = FIRST_BACKOFF_SECONDS
        self._num_corrupt = self._num_corrupt + 1 if broken.is_corrupt else 0
        if self._num_corrupt == MAX_CORRUPT_MODELS:
            raise CorruptUpdate(f"{self._num_corrupt} times in a row {broken}") from None
        left_seconds = self._last_contact + self._patience_seconds - time.monotonic()
        if left_seconds <= 0:
            protection = "with TLS" if self._has_tls else "without TLS"
            raise ConnectionLost(
                f"{self._address} could not be reached for {self._patience_seconds:g} s: {broken}",
                remedy=self.hint(broken)
                or f"check the address and that the server runs, {protection} as this device",
            ) from None
        seconds = min(self._backoff_seconds * random.uniform(0.5, 1.0), left_seconds)
        self._backoff_seconds = min(self._backoff_seconds * 2, self._max_backoff)
        return seconds

    def is_news(self, broken: ConnectionBroken, why: str) -> bool:
        """Whether to log why a connection broke.

        It is after a contact, for another reason than last, or if that was said a while ago.
        """
        reason, now = PORT.sub("", why), time.monotonic()
        is_old = now - self._said_at >= SAY_AGAIN_SECONDS
        is_news = broken.had_contact or is_old or reason != self._said
        if is_news:
            self._said, self._said_at = reason, now
        return is_news

    def hint(self, broken: ConnectionBroken) -> str | None:
        """Return what to change, if the text tells: a proxy, other names, TLS on one side.

        Whether both sides have TLS is settled by the first contact.
        """
        text = str(broken)
        if broken.had_contact:
            return None
        if proxied := [host for host in self._hosts if proxy_of(host) is not None]:
            return f"it goes through {proxy_of(proxied[0])}: {proxy_remedy(proxied[0])}"
        if "Hostname Verification" in text:
            from headwater.common.transport.server_names import name_remedy

            names = " or ".join(self._hosts)
            return (
                "its certificate was made for other names, which `headwater-client doctor` lists: "
                f"{name_remedy(names)}"
            )
        if self._had_contact:
            return None
        if self._has_tls and "WRONG_VERSION_NUMBER" in text:
            return (
                "the server may be without TLS: give it certificates (`headwater-server init`), or "
                "leave out --tls-ca, --tls-certificate and --tls-key"
            )
        if not self._has_tls and any(closed in text for closed in CLOSED):
            return (
                "the server may want TLS: --tls-ca, --tls-certificate and --tls-key, or --config "
                "with the file that `headwater-client join` wrote"
            )
        return None
