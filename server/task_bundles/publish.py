"""``headwater-server signer`` and ``publish``: the operator's key, and tasks that it signs."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from pydantic import ValidationError

from headwater.common.errors import SettingsError, TaskBundleRefused
from headwater.common.system.atomic_file import OWNER_ONLY, write_atomically
from headwater.common.task_bundles.requirements import check_requirements
from headwater.common.task_bundles.signed_bundle import (
    MAX_FILES,
    SUFFIX,
    Content,
    TaskBundle,
    key_text,
    read_bundle,
    signed,
)
from headwater.common.transport.trusted_file import read_trusted
from headwater.common.user_code.task_spec import find_task, name_of, source_file

LEFT_OUT = ("__pycache__",)


def signer_key(path: Path) -> tuple[Ed25519PrivateKey, bool]:
    """Return the key in a file, made if there is none, and whether it is new.

    Raises:
        SettingsError: the file cannot be written; or as ``saved_signer_key``.
    """
    if path.exists():
        return saved_signer_key(path), False
    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, pem, mode=OWNER_ONLY)
    except OSError as error:
        raise SettingsError(
            f"the signer's key {path}: {error}", remedy="name another file"
        ) from error
    return key, True


def saved_signer_key(path: Path) -> Ed25519PrivateKey:
    """Return the key in a file. It makes none: no device would trust a key of a misspelt file.

    Raises:
        SettingsError: the file is missing, cannot be read, or others may read it; or it has no
            such key.
    """
    make = "make one with `headwater-server signer FILE`"
    if not path.exists():
        raise SettingsError(f"there is no signer's key {path}", remedy=f"correct --key, or {make}")
    try:
        text = read_trusted(path, is_secret=True)
        saved = load_pem_private_key(text, password=None)
    except OSError as error:
        raise SettingsError(
            f"the signer's key {path}: {error}", remedy="name another file with --key"
        ) from error
    except (ValueError, TypeError) as error:
        raise SettingsError(
            f"{path} is no signer's key: it has no private key in PEM, or one with a password",
            remedy=f"correct --key, or {make}",
        ) from error
    if not isinstance(saved, Ed25519PrivateKey):
        raise SettingsError(f"the signer's key {path} is no Ed25519 key", remedy=make)
    return saved


def publish(
    spec: str,
    *,
    key: Ed25519PrivateKey,
    folder: Path | None = None,
    beside: Sequence[Path] = (),
    requires: Sequence[str] = (),
    version: int | None = None,
    out: Path | None = None,
) -> tuple[TaskBundle, Path]:
    """Write a task's bundle, and return it with its file.

    With ``folder`` all files below it are in the bundle, which must have the task's file; else that
    file and those ``beside`` it, of a folder all. Without a ``version`` it is one more than that of
    the newest bundle in the folder.

    Raises:
        UnknownTask: the task cannot be loaded here.
        SettingsError: a file cannot be read, has a private key, or is outside of ``folder``; or
            there is another bundle of this version.
        TaskBundleRefused: too large, or a requirement is missing or names no package.
    """
    find_task(spec)
    file, name = source_file(spec), name_of(spec)
    if file is None:
        raise SettingsError(
            f"{spec} is a module, and a bundle has files",
            remedy="name the task's file: publish my_task.py:MyTask",
        )
    root = file.resolve().parent if folder is None else folder.resolve()
    own = [file.resolve()]
    for one in map(Path.resolve, beside):
        own += _files_of(one) if one.is_dir() else [one]
    paths = own if folder is None else _files_of(root)
    if outside := [one for one in own if one not in paths or not one.is_relative_to(root)]:
        raise SettingsError(
            f"{outside[0]} is not in the folder {root}",
            remedy="name the folder that has it: --folder",
        )
    number, target = _place(file.parent if out is None else out, name, version)
    try:
        content = Content(
            name=name,
            file=file.resolve().relative_to(root).as_posix(),
            version=number,
            requires=tuple(requires),
            files={
                one.relative_to(root).as_posix(): base64.b64encode(one.read_bytes()).decode()
                for one in paths
            },
        )
        _check_no_secret(paths)
        check_requirements(requires, title=name)
        return _write(signed(content, key), target), target
    except ValidationError as error:
        raise TaskBundleRefused(error.errors()[0]["msg"]) from error
    except OSError as error:
        raise SettingsError(
            f"{error.filename}: {error.strerror}",
            remedy="name files that are there with --with, and a place that can be written with "
            "--out",
        ) from error


def publish_again(
    file: Path, *, key: Ed25519PrivateKey, version: int | None = None, out: Path | None = None
) -> tuple[TaskBundle, Path]:
    """Write the files of an earlier bundle as a new version: so a task is rolled back.

    Raises:
        SettingsError: the file cannot be read, another signer's key signed it, or its new place
            cannot be written.
        TaskBundleRefused: it is no bundle, or a requirement is missing.
    """
    try:
        earlier = read_bundle(file.read_bytes())
        if earlier.signer != public_key(key):
            raise SettingsError(
                f"{file} is signed by {earlier.signer}, and --key is another one",
                remedy="name the key that signed it; of another signer's task publish the files, "
                "once you have read them",
            )
        name = earlier.content.name
        number, target = _place(file.parent if out is None else out, name, version)
        check_requirements(earlier.content.requires, title=name)
        content = earlier.content.model_copy(update={"version": number})
        return _write(signed(content, key), target), target
    except OSError as error:
        raise SettingsError(f"{error.filename}: {error.strerror}") from error


def _place(out: Path, name: str, version: int | None) -> tuple[int, Path]:
    """Return a bundle's version and its file: ``out``, or one in this folder."""
    if out.is_dir():
        number = _next_version([*out.glob(f"{name}-*{SUFFIX}")], name, version)
        return number, out / f"{name}-{number}{SUFFIX}"
    return _next_version([out], name, version), out


def _write(data: bytes, target: Path) -> TaskBundle:
    """Write a bundle, but not over other files of the same task and version.

    Raises:
        SettingsError: there are such files: a device that has had them refuses the new ones.
    """
    bundle, before = read_bundle(data), _bundle_in(target)
    if before is not None and before.title == bundle.title and before.digest != bundle.digest:
        raise SettingsError(
            f"{target} has other files of version {bundle.content.version} already, and devices "
            "take only one set of files of a version",
            remedy="leave out --version for the next one; if no device has had it, delete it first",
        )
    write_atomically(target, data)
    return bundle


def _files_of(root: Path) -> list[Path]:
    """Return all files of a folder, without what begins with a dot and what Python compiles.

    Raises:
        SettingsError: there are too many, or one is a link.
    """
    found: list[Path] = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(one for one in names if one not in LEFT_OUT and not one.startswith("."))
        found += [Path(folder, one) for one in sorted(files) if not one.startswith(".")]
        found = [one for one in found if one.suffix not in (SUFFIX, ".pyc")]
        if len(found) > MAX_FILES:
            raise SettingsError(
                f"{root} has more than {MAX_FILES} files",
                remedy="name a folder of code alone; many files of a test go into one, which the "
                "task opens: a .npz or a .zip",
            )
    if links := [one for one in found if one.is_symlink()]:
        raise SettingsError(
            f"{links[0]} is a link, and a bundle has files", remedy="copy what it leads to"
        )
    return found


def _check_no_secret(paths: Sequence[Path]) -> None:
    """Check that no file is a private key: who has the bundle would have it too.

    Raises:
        SettingsError: one is.
    """
    for path in paths:
        if b"PRIVATE KEY-----" in path.read_bytes():
            raise SettingsError(
                f"{path} has a private key, and all devices would get it",
                remedy="keep keys out of the folder that is published",
            )


def _next_version(files: Sequence[Path], name: str, version: int | None) -> int:
    """Return ``version``, or one more than the newest of a task's bundles in ``files``."""
    found = [one.content for one in map(_bundle_in, files) if one is not None]
    newest = max((one.version for one in found if one.name == name), default=0)
    return newest + 1 if version is None else version


def _bundle_in(path: Path) -> TaskBundle | None:
    try:
        return read_bundle(path.read_bytes())
    except (TaskBundleRefused, OSError):
        return None


def public_key(key: Ed25519PrivateKey) -> str:
    """Return what owners put into ``--trust``."""
    return key_text(key.public_key())
