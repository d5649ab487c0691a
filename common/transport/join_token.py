"""The join token: one string with which a device finds its server, trusts it and enrols once.

``headwater-server enroll`` prints it, ``headwater-client join`` takes it. It contains the address
of the enrolment port, the SHA-256 of the authority's certificate, the device's name, a secret of
256 bits and its expiry: all that a device needs for its request. The server stores only a hash of
the secret. The first device that uses the token is enrolled: treat it like a password.
"""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import hashlib
import json
import secrets
from dataclasses import dataclass, field

from headwater.common.errors import JoinTokenBroken, SettingsError
from headwater.common.parsed_text import json_of
from headwater.common.transport.certificates import check_name
from headwater.common.transport.tls import split_address

PREFIX = "headwater-join-1."
SECRET_BYTES, DIGEST_BYTES, CHECK_BYTES = 32, 32, 4
MAX_TOKEN_CHARACTERS = 2048


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinToken:
    """The fields of a join token."""

    address: str
    """HOST:PORT of the enrolment port."""
    fingerprint: bytes
    name: str
    expires_at: int
    """Seconds since 1970, by the server's clock."""
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls, *, address: str, fingerprint: bytes, name: str, expires_at: int) -> JoinToken:
        """Return a token with a new random secret."""
        return cls(
            address=address,
            fingerprint=fingerprint,
            name=name,
            expires_at=expires_at,
            secret=secrets.token_bytes(SECRET_BYTES),
        )

    @property
    def secret_digest(self) -> bytes:
        """The hash of the secret, which the server stores."""
        return secret_digest(self.secret)

    @property
    def expiry(self) -> dt.datetime:
        """The time at which the token expires."""
        return dt.datetime.fromtimestamp(self.expires_at, dt.UTC)

    def encode(self) -> str:
        """Return the token as a string, which ``parse`` reads."""
        fields = {
            "address": self.address,
            "authority": _text(self.fingerprint),
            "name": self.name,
            "expires": self.expires_at,
            "secret": _text(self.secret),
        }
        body = json.dumps(fields, separators=(",", ":")).encode()
        return PREFIX + _text(body + _check(body))

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """Parse a token.

        Raises:
            JoinTokenBroken: it is no token, or incomplete; the message does not quote it.
        """
        text = "".join(text.split())  # terminals and mail programs insert line breaks
        if not text:
            raise JoinTokenBroken("expected a join token, found nothing")
        if not text.startswith(PREFIX) or len(text) > MAX_TOKEN_CHARACTERS:
            raise JoinTokenBroken(f"a join token begins with {PREFIX}, this does not")
        try:
            whole = _bytes(text.removeprefix(PREFIX))
            body, check = whole[:-CHECK_BYTES], whole[-CHECK_BYTES:]
            # The last character has bits that are in no byte: they must be as we write them.
            if check != _check(body) or PREFIX + _text(whole) != text:
                raise JoinTokenBroken("the join token is incomplete, or a character was changed")
            return cls._of(json_of(body))
        except (ValueError, KeyError, TypeError, AttributeError, SettingsError) as error:
            if isinstance(error, JoinTokenBroken):
                raise
            raise JoinTokenBroken("the join token has missing or invalid fields") from None

    @classmethod
    def _of(cls, fields: dict[str, object]) -> JoinToken:
        address, name, expires = fields["address"], fields["name"], fields["expires"]
        if not isinstance(address, str) or not isinstance(name, str) or type(expires) is not int:
            raise TypeError
        if not 0 <= expires < 2**40:
            raise ValueError
        split_address(address)
        check_name(name)
        fingerprint, secret = _bytes(fields["authority"]), _bytes(fields["secret"])
        if len(fingerprint) != DIGEST_BYTES or len(secret) != SECRET_BYTES:
            raise ValueError
        return cls(
            address=address, fingerprint=fingerprint, name=name, expires_at=expires, secret=secret
        )


def secret_digest(secret: bytes) -> bytes:
    """Return the hash that the server stores; for 256 random bits a plain hash suffices."""
    return hashlib.sha256(b"headwater join\0" + secret).digest()


def _check(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()[:CHECK_BYTES]


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _bytes(text: object) -> bytes:
    if not isinstance(text, str):
        raise TypeError
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError from error
