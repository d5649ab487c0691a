"""Bytes that must not be seen: they show nothing, are not copied by accident, and can be erased.

What erasing means in CPython: the bytes lie in one ``bytearray``, which is overwritten with zeros.
Copies that libraries make are out of reach: ``X25519PrivateKey.exchange`` returns ``bytes``, which
are freed and not cleared; OpenSSL clears its contexts when they are freed, and nobody clears the
stack. So erasing shortens the time in which a secret can be found in memory, and keeps this program
from using it again. It does not promise that no copy is left, nor does it speak of swap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

from headwater.common.errors import SecretErased

T = TypeVar("T")


class Secret:
    """Secret bytes: repr, str and format show none of them; pickle and copy are refused.

    Two secrets are equal only if they are the same object: a comparison that says where two byte
    strings differ by the time it takes is not offered.
    """

    __slots__ = ("_bytes", "_is_erased", "_made")

    def __init__(self, value: bytes | bytearray | memoryview) -> None:
        self._bytes = bytearray(value)
        self._is_erased = False
        self._made: object = None

    @classmethod
    def over(cls, buffer: bytearray) -> Secret:
        """Take a buffer over rather than copy it; the caller keeps no other use of it."""
        secret = cls(b"")
        secret._bytes = buffer
        return secret

    def reveal(self) -> memoryview:
        """Return a read-only view of the bytes; it reads zeros once they are erased.

        Raises:
            SecretErased: they are gone.
        """
        if self._is_erased:
            raise SecretErased("a key was asked for after its session had ended")
        return memoryview(self._bytes).toreadonly()

    def made_into(self, make: Callable[[memoryview], T]) -> T:
        """Return what ``make`` makes of the bytes: the same object until they are erased.

        A secret is made into one kind of thing only, such as a library's own form of a key.

        Raises:
            SecretErased: they are gone.
        """
        if self._is_erased or self._made is None:
            self._made = make(self.reveal())
        return cast(T, self._made)

    def erase(self) -> None:
        """Overwrite the bytes with zeros. Erasing twice changes nothing."""
        self._is_erased = True
        self._made = None
        self._bytes[:] = bytes(len(self._bytes))

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
