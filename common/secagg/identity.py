"""A device's long-lived signing identity, and the allow-list of identities that devices trust.

An identity is a name and an Ed25519 key (RFC 8032). In active mode a device signs its keys for a
session, and the survivor set that it agrees to; the other devices verify the signatures with an
allow-list, a file of names and public keys that reached each device by another channel than the
aggregator. Without such a list a device cannot tell another device from an aggregator that
impersonates one (a Sybil), which is why semi-honest mode trusts the aggregator to forward keys
unchanged.

This module does not access the disk: the command line reads and writes the files.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from headwater.common.errors import IdentityProblem, IdentityUnknown, SignatureRefused
from headwater.common.secagg.secret import forbid_core_dumps
from headwater.common.transport.limits import NAME_PATTERN

KEY_BYTES, SIGNATURE_BYTES = 32, 64


@dataclass(frozen=True, slots=True)
class SigningIdentity:
    """A name and its private signing key; the key is never printed."""

    name: str
    _key: Ed25519PrivateKey

    def __post_init__(self) -> None:
        """Keep the key out of a core file."""
        forbid_core_dumps()

    @classmethod
    def new(cls, name: str) -> SigningIdentity:
        """Generate a new identity from the system's randomness.

        Raises:
            IdentityProblem: the name is not a valid device name.
        """
        return cls(_checked_name(name), Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, name: str, seed: bytes) -> SigningIdentity:
        """Return the identity whose private key is these 32 bytes.

        Raises:
            IdentityProblem: the name is not a valid device name.
        """
        return cls(_checked_name(name), Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def from_pem(cls, name: str, pem: bytes) -> SigningIdentity:
        """Read an identity from the PEM of ``to_pem``.

        Raises:
            IdentityProblem: not the PEM of an unencrypted Ed25519 key.
        """
        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise IdentityProblem(f"{name}: not the PEM of a private key") from error
        if not isinstance(key, Ed25519PrivateKey):
            raise IdentityProblem(f"{name}: a private key, but not of Ed25519")
        return cls(_checked_name(name), key)

    def to_pem(self) -> bytes:
        """Return the private key in PEM; store it in a file that only its owner can read."""
        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())

    @property
    def public_key(self) -> bytes:
        """The 32-byte public key."""
        return self._key.public_key().public_bytes_raw()

    @property
    def line(self) -> str:
        """The identity's line in an allow-list."""
        return f"{self.name} {base64.b64encode(self.public_key).decode()}"

    def sign(self, message: bytes) -> bytes:
        """Return the 64-byte signature, which is deterministic."""
        return self._key.sign(message)

    def __repr__(self) -> str:
        return f"SigningIdentity({self.line})"


@dataclass(frozen=True, slots=True)
class AllowList:
    """The identities whose signatures are valid: public keys by name."""

    keys: Mapping[str, bytes]

    @classmethod
    def parse(cls, text: str) -> AllowList:
        """Parse lines of ``NAME BASE64``; # begins a comment.

        Raises:
            IdentityProblem: naming a malformed line, or a name or key that occurs twice: two names
                with one key would be one device that counts as two.
        """
        keys: dict[str, bytes] = {}
        names: dict[bytes, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            fields = line.partition("#")[0].split()
            if not fields:
                continue
            name, key = _entry(fields, number)
            if name in keys:
                raise IdentityProblem(f"line {number} of the allow-list: {name} is there twice")
            if key in names:
                raise IdentityProblem(
                    f"line {number} of the allow-list: {name} has the key of {names[key]}"
                )
            keys[name], names[key] = key, name
        return cls(keys)

    def verify(self, name: str, message: bytes, signature: bytes | None) -> None:
        """Verify a signature with the key of a name.

        Raises:
            IdentityUnknown: the name is not on the list.
            SignatureRefused: the signature is missing, or not valid for that key and message.
        """
        key = self.keys.get(name)
        if key is None:
            raise IdentityUnknown(f"{name} is not on this device's allow-list")
        if signature is None:
            raise SignatureRefused(f"{name}: a signature was expected, there is none")
        if not _is_signed(key, message, signature):
            raise SignatureRefused(
                f"{name}: the signature is not valid for the key on this device's allow-list"
            )


@functools.lru_cache(maxsize=4096)
def _is_signed(key: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether a signature is valid; cached for processes that simulate many devices."""
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except InvalidSignature:
        return False
    return True


def _entry(fields: list[str], number: int) -> tuple[str, bytes]:
    where = f"line {number} of the allow-list"
    if len(fields) != 2:
        raise IdentityProblem(f"{where}: expected NAME BASE64, found {len(fields)} words")
    try:
        key = base64.b64decode(fields[1], validate=True)
    except binascii.Error as error:
        raise IdentityProblem(f"{where}: the key is not base64") from error
    if len(key) != KEY_BYTES:
        raise IdentityProblem(f"{where}: a key of {len(key)} bytes, expected {KEY_BYTES}")
    return _checked_name(fields[0]), key


def _checked_name(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        raise IdentityProblem(
            f"{name[:80]!r} is not a valid device name",
            remedy="use at most 128 letters, digits, dots, dashes and underscores",
        )
    return name
