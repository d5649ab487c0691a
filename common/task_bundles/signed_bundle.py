"""A task bundle: a task's files, its version and what it needs, signed by whoever publishes it.

    "headwater task 1" LF | public key (32 bytes) | signature (64 bytes) | content (JSON)

The signature, of Ed25519, is over ``CONTEXT`` and the content's SHA-256, which is the bundle's
digest: nothing in the file can change without it, and the same files give the same digest. What
installs a bundle is ``unpacked``; only then is its code imported, by whoever trusts the signer.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from packaging.requirements import InvalidRequirement, Requirement
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from headwater.common.errors import TaskBundleRefused, UnknownTask
from headwater.common.parsed_text import json_of
from headwater.common.settings.machines import ClientSettings
from headwater.common.settings.schema import Settings
from headwater.common.system.atomic_file import write_atomically
from headwater.common.user_code.task_spec import BUNDLE, bundle_folder

MAGIC = b"headwater task 1\n"
CONTEXT = b"headwater task bundle 1\0"
KEY_BYTES, SIGNATURE_BYTES = 32, 64
MAX_BYTES = 900_000
"""A bundle is one frame of the stream."""
MAX_FILES = 200
SUFFIX = ".task"
FOLDER = "tasks"
"""Of all bundles' files, in the state folder."""
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
# Names that Windows takes for devices, with any ending.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


class Content(BaseModel):
    """What a bundle holds."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")
    """Of the task: its class, or the object that its file makes."""
    file: str
    """The file that has it."""
    version: int = Field(ge=1, le=2**53)
    requires: tuple[str, ...] = Field(default=(), max_length=50, strict=False)
    """The packages that must be installed, as pip names them."""
    files: Mapping[str, str] = Field(min_length=1, max_length=MAX_FILES)
    """By path, from the bundle's folder, each file in base64."""

    @field_validator("files")
    @classmethod
    def _check_paths(cls, files: Mapping[str, str]) -> Mapping[str, str]:
        for path in files:
            parts = path.split("/")
            if len(parts) > 8 or not all(_PART.fullmatch(one) for one in parts):
                raise ValueError(f"{path!r:.120} is no plain path within the bundle's folder")
            if any(_DEVICES.fullmatch(one) or one.endswith(".") for one in parts):
                raise ValueError(f"{path!r:.120} is no file's name on Windows")
        folded = {path.lower() for path in files}
        parents = {str(one) for path in folded for one in PurePosixPath(path).parents}
        if len(folded) < len(files) or folded & parents:
            raise ValueError("two of its files have one place")
        return files

    @field_validator("requires")
    @classmethod
    def _check_requires(cls, requires: tuple[str, ...]) -> tuple[str, ...]:
        for one in requires:
            try:
                parsed = Requirement(one)
            except InvalidRequirement as error:
                raise ValueError(f"{one!r:.120} names no package") from error
            if parsed.url is not None or len(one) > 200:
                raise ValueError(f"{one!r:.120} is no package's name and version")
        return requires


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskBundle:
    """A bundle whose signature is right; whose signer it is, is for the owner to judge."""

    content: Content
    signer: str
    """The key, as ``key_text`` writes it."""
    digest: str
    """The SHA-256 of the content, in hexadecimal."""
    data: bytes

    @property
    def file_name(self) -> str:
        """The name of its file, as it is published."""
        return f"{self.content.name}-{self.content.version}{SUFFIX}"

    @property
    def title(self) -> str:
        """Its name and version, for people."""
        return f"{self.content.name} {self.content.version}"


def key_text(key: Ed25519PublicKey) -> str:
    """Return a public key as a text that a shell takes as one word, and no flag."""
    return "hw" + base64.urlsafe_b64encode(key.public_bytes_raw()).decode().rstrip("=")


def signed(content: Content, key: Ed25519PrivateKey) -> bytes:
    """Return the bundle of a content, signed.

    Raises:
        TaskBundleRefused: it is larger than ``MAX_BYTES``.
    """
    plain = content.model_dump(mode="json")
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    signature = key.sign(CONTEXT + hashlib.sha256(text).digest())
    data = MAGIC + key.public_key().public_bytes_raw() + signature + text
    if len(data) > MAX_BYTES:
        raise TaskBundleRefused(
            f"the bundle has {len(data):,} bytes, and may have {MAX_BYTES:,}",
            remedy="publish code alone: data and weights reach a device by other ways",
        )
    return data


def read_bundle(data: bytes) -> TaskBundle:
    """Return what a bundle holds, after checking its signature and its form.

    Raises:
        TaskBundleRefused: it is none, or was changed after it was signed.
    """
    if len(data) > MAX_BYTES or not data.startswith(MAGIC):
        raise TaskBundleRefused("this is no task bundle, or one of another version of headwater")
    at = len(MAGIC)
    raw, at = data[at : at + KEY_BYTES], at + KEY_BYTES
    signature, text = data[at : at + SIGNATURE_BYTES], data[at + SIGNATURE_BYTES :]
    digest = hashlib.sha256(text).digest()
    try:
        key = Ed25519PublicKey.from_public_bytes(raw)
        key.verify(signature, CONTEXT + digest)
    except (InvalidSignature, ValueError) as error:
        raise TaskBundleRefused(
            "the bundle was changed after it was signed, or cut off",
            remedy="publish it again, and copy the whole file",
        ) from error
    try:
        content = Content.model_validate(json_of(text.decode()))
        for name, one in content.files.items():
            base64.b64decode(one, validate=True)
            if name == content.file and not name.endswith(".py"):
                raise ValueError(f"{name!r:.120} is no Python file")
        if content.file not in content.files:
            raise ValueError(f"it lacks the file {content.file!r:.120}")
    except (ValueError, RecursionError) as error:
        first = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise TaskBundleRefused(f"the bundle's content is none: {first}") from error
    return TaskBundle(content=content, signer=key_text(key), digest=digest.hex(), data=data)


def unpacked(bundle: TaskBundle, folder: Path) -> str:
    """Write a bundle's files to a folder of its own in ``folder``; return the task's place there.

    A folder that has the bundle keeps it; its files are written anew, so that they are the
    bundle's. Other files in it are removed.

    Raises:
        OSError: the folder cannot be written.
    """
    own = folder / bundle.digest[:32]
    own.mkdir(parents=True, exist_ok=True)
    for path in own.rglob("*"):
        is_known = path.relative_to(own).as_posix() in bundle.content.files
        if not is_known and not path.is_dir() and path.name != BUNDLE:
            path.unlink()
    for name, text in bundle.content.files.items():
        path, content = own / name, base64.b64decode(text)
        if path.is_symlink() or not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content)
    if not (own / BUNDLE).is_file() or (own / BUNDLE).read_bytes() != bundle.data:
        write_atomically(own / BUNDLE, bundle.data)
    return f"{own / bundle.content.file}:{bundle.content.name}"


def bundle_of(spec: str) -> TaskBundle | None:
    """Return the bundle that a task's file was unpacked from; None if it is none's.

    Raises:
        TaskBundleRefused: see ``read_bundle``.
        OSError: it cannot be read.
    """
    folder = bundle_folder(spec)
    return None if folder is None else read_bundle((folder / BUNDLE).read_bytes())


def with_opened_task(settings: Settings) -> Settings:
    """Return settings that name a bundle's file with the place of its task, which is unpacked.

    Raises:
        TaskBundleRefused: see ``read_bundle``.
        UnknownTask: there is no such file, or its files cannot be written.
    """
    if settings.task is None or not settings.has_task_bundle:
        return settings
    spec = opened_task(settings.task, settings.client.state_folder)
    return settings.model_copy(update={"task": spec})


def opened_task(spec: str, state_folder: Path | None = None) -> str:
    """Return the place of the task of a bundle's file, which is unpacked into the state folder.

    Raises:
        TaskBundleRefused, UnknownTask: see ``with_opened_task``.
    """
    folder = ClientSettings().state_folder if state_folder is None else state_folder
    try:
        return unpacked(read_bundle(Path(spec).read_bytes()), folder / FOLDER)
    except OSError as error:
        raise UnknownTask(f"{error.filename}: {error.strerror}") from error
