"""Bytes that must not be seen: they show nothing, are not copied by accident, and can be erased.

What erasing means in CPython: the bytes lie in one ``bytearray`` that is overwritten with zeros.
Copies that libraries made are out of reach: ``X25519PrivateKey.exchange`` returns ``bytes``, which
are freed and not cleared; OpenSSL clears most of its own contexts when they are freed. Erasing
therefore shortens the time that a secret can be found in memory, and makes sure that this program
does not use it again; it does not promise that no copy is left, nor anything of swap.
"""

from __future__ import annotations

from typing import NoReturn


class Secret:
    """Secret bytes. Its repr, its pickle and its copies are refused or show nothing."""

    __slots__ = ("_bytes", "_is_erased")

    def __init__(self, value: bytes | bytearray | memoryview) -> None:
        self._bytes = bytearray(value)
        self._is_erased = False

    def reveal(self) -> memoryview:
        """Return a read-only view of the bytes; it reads zeros once they are erased.

        Raises:
            SecretErased: they are gone.
        """
        raise NotImplementedError

    def erase(self) -> None:
        """Overwrite the bytes with zeros. Erasing twice changes nothing."""
        raise NotImplementedError

    @property
    def is_erased(self) -> bool:
        """Whether the bytes are gone."""
        return self._is_erased

    def __len__(self) -> int:
        return len(self._bytes)

    def __repr__(self) -> str:
        return "Secret(erased)" if self._is_erased else "Secret(...)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret is never pickled or copied")
