"""Secret bytes that are never printed or copied by accident, and that can be erased.

In CPython, erasing means that the bytes are in one ``bytearray``, which is overwritten with zeros.
It does not reach the copies that libraries make: ``X25519PrivateKey.exchange`` returns ``bytes``,
which are freed and not cleared; OpenSSL clears its contexts when they are freed; the stack is not
cleared. So erasing shortens the time in which a secret can be found in memory, and keeps this
program from using it again. It does not guarantee that no copy is left, in memory or in swap. A
process that holds a secret leaves no core file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

from headwater.common.errors import SecretErased
from headwater.common.system.portability import optional_module

T = TypeVar("T")
resource = optional_module("resource")  # Windows has none, and writes no core files


@functools.cache
def forbid_core_dumps() -> None:
    """Let a crash of this process write no image of its memory, with the keys in it.

    A soft limit of one byte: at 0 Linux would still hand the image to a program that collects them.
    """
    if resource is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
        if soft not in (0, 1):
            resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))


class Secret:
    """Secret bytes: repr, str and format never show them; pickle and copy are refused.

    Two secrets are equal only if they are the same object, so that no comparison of bytes leaks by
    its timing where they differ.
    """

    __slots__ = ("_bytes", "_form", "_is_erased")

    def __init__(self, value: bytes | bytearray | memoryview) -> None:
        forbid_core_dumps()
        self._bytes = bytearray(value)
        self._is_erased = False
        self._form: object = None

    @classmethod
    def take(cls, buffer: bytearray) -> Secret:
        """Take ownership of a buffer instead of copying it; the caller must not use it again."""
        secret = cls(b"")
        secret._bytes = buffer
        return secret

    def reveal(self) -> memoryview:
        """Return a read-only view of the bytes; it reads zeros after they are erased.

        Raises:
            SecretErased: the secret was erased.
        """
        if self._is_erased:
            raise SecretErased("a key was used after its session had ended")
        return memoryview(self._bytes).toreadonly()

    def cached_form(self, convert: Callable[[memoryview], T]) -> T:
        """Return ``convert(bytes)``, cached until the secret is erased.

        A secret has one form only, such as a library's key object: use one ``convert`` for each.

        Raises:
            SecretErased: the secret was erased.
        """
        if self._is_erased or self._form is None:
            self._form = convert(self.reveal())
        return cast(T, self._form)

    def erase(self) -> None:
        """Overwrite the bytes with zeros. Erasing twice changes nothing."""
        self._is_erased = True
        self._form = None
        self._bytes[:] = bytes(len(self._bytes))

    @property
    def is_erased(self) -> bool:
        """Whether the secret was erased."""
        return self._is_erased

    def __len__(self) -> int:
        return len(self._bytes)

    def __repr__(self) -> str:
        return "Secret(erased)" if self._is_erased else "Secret(...)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret is never pickled or copied")
