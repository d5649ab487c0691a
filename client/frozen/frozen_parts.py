"""A device's store of frozen parts: files by digest, which outlive a round, a run and a restart.

A run's plans name the digest of the model's frozen part. A device whose task builds the same one is
never sent it; another device is sent it once, and keeps it in ``frozen/DIGEST.safetensors`` of its
state folder, for all runs and all devices that share the folder. A file is checked against its
digest whenever a process loads it; one that is damaged is deleted, and the server sends the frozen
part again. The files that were not used for the longest time are deleted above the limit. A full
disk costs the file, never the round.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from headwater.client.flower.request import DeviceRequest
from headwater.common.errors import CorruptUpdate, FrozenPartMissing
from headwater.common.flower import records
from headwater.common.messages import FrozenPart, FrozenReport
from headwater.common.model import frozen_part
from headwater.common.model.frozen_part import Fingerprint, fingerprint_of
from headwater.common.model.parameters import ModelImage
from headwater.common.system.atomic_file import OWNER_ONLY, atomic_writer, make_private_folder

log = logging.getLogger(__name__)

FOLDER, SUFFIX = "frozen", ".safetensors"


class FrozenFiles:
    """The frozen parts in a state folder."""

    def __init__(self, state_folder: Path, *, limit_bytes: int) -> None:
        """``limit_bytes`` holds for all files but the one that is in use."""
        self._folder = state_folder / FOLDER
        self._limit_bytes = limit_bytes

    def load(self, image: ModelImage, digest: str) -> bool:
        """Map a frozen part into the model; return False if there is no undamaged file of it."""
        path = self._path(digest)
        try:
            frozen_U8 = frozen_part.read(path, image.layout)
            found = fingerprint_of(image.layout, frozen_U8)
        except FileNotFoundError:
            return False
        except OSError as error:
            log.warning("the frozen part in %s cannot be read: %s", path, error.strerror)
            return False
        except ValueError as error:
            return self._drop(path, str(error))
        if found.digest != digest:
            return self._drop(path, f"its SHA-256 is {found.digest:.12}, not {digest:.12}")
        image.adopt_frozen(frozen_U8, found, is_file=True)
        with contextlib.suppress(OSError):
            os.utime(path)  # the order in which files are deleted
        return True

    def store(self, image: ModelImage, fingerprint: Fingerprint) -> None:
        """Write the model's frozen part to a file, and map that in place of the memory."""
        path = self._path(fingerprint.digest)
        # Devices that share the folder may write at the same time: each has a file of its own.
        own = path.with_name(f"{fingerprint.digest}-{os.getpid()}{SUFFIX}")
        try:
            make_private_folder(self._folder)
            with atomic_writer(own, mode=OWNER_ONLY) as part:
                frozen_part.write(part, image.layout, image.frozen_U8)
            own.replace(path)
            frozen_U8 = frozen_part.read(path, image.layout)
            image.adopt_frozen(frozen_U8, fingerprint, is_file=True)
        except (OSError, ValueError) as error:
            log.warning(
                "the frozen part of the model is not kept: %s; this process has it in memory, the "
                "next one is sent it again",
                error,
            )
        self._prune(keep=path)

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}{SUFFIX}"

    def _drop(self, path: Path, why: str) -> bool:
        log.warning("the frozen part in %s is damaged and is deleted: %s", path, why)
        with contextlib.suppress(OSError):
            path.unlink()
        return False

    def _prune(self, *, keep: Path) -> None:
        """Delete the files that were not used for the longest time, above the limit."""
        with contextlib.suppress(OSError):  # another process deletes files as well
            # With what a kill has left half-written (``atomic_writer``).
            found = self._folder.glob(f"*{SUFFIX}*")
            files = [(one.stat(), one) for one in found if one != keep]
            total = sum(stat.st_size for stat, _ in files)
            for stat, path in sorted(files, key=lambda file: file[0].st_mtime):
                if total <= self._limit_bytes:
                    return
                path.unlink()
                total -= stat.st_size


def holds_frozen(request: DeviceRequest, digest: str | None) -> bool:
    """Return whether the device has a frozen part, from its task or a file; load it into the model.

    True if the run's model has none.
    """
    trainer = request.trainer
    trainer.loaded_model.restore_frozen()
    if digest is None or trainer.image.frozen_digest == digest:
        return True
    return _files(request).load(trainer.image, digest)


def require_frozen(request: DeviceRequest, digest: str | None) -> None:
    """Load the frozen part that a plan names.

    Raises:
        FrozenPartMissing: the device does not have it.
    """
    if not holds_frozen(request, digest):
        raise FrozenPartMissing(
            f"{request.identity.name} no longer has the frozen part {digest:.12} of the model"
        )


def take_frozen(request: DeviceRequest) -> FrozenReport:
    """Take the frozen part that came with a message into the model, and keep it in a file.

    Raises:
        CorruptUpdate: it has another size or another digest than the message says.
    """
    image, content = request.trainer.image, request.message.content
    wanted = records.read(content, FrozenPart).digest
    received = records.vector(content)
    if received is None or len(received) != image.layout.num_frozen_bytes:
        raise CorruptUpdate(
            f"expected a frozen part of {image.layout.num_frozen_bytes:,} bytes, found "
            f"{0 if received is None else len(received):,}"
        )
    image.frozen_buffer()[:] = received  # our stream receives it in this place already
    if image.frozen_digest != wanted:
        image.fingerprint = None
        raise CorruptUpdate(f"the frozen part that was received is not {wanted:.12}")
    assert image.fingerprint is not None
    log.info(
        "received the frozen part of the model, %.1f MB; it is kept", len(received) / 1_000_000
    )
    _files(request).store(image, image.fingerprint)
    return FrozenReport(name=request.identity.name, digest=wanted)


def _files(request: DeviceRequest) -> FrozenFiles:
    return FrozenFiles(request.state_folder, limit_bytes=request.settings.client.frozen_bytes)
