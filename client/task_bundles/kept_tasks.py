"""The bundles that a device has taken, in its state folder, and what it takes at all.

A bundle is taken if the owner trusts its signer, and pins no other digest; if it is no older than
the last of its name by this signer, and no other one of the same version; and if what it needs is
installed. Nothing of a bundle is imported before.
"""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from headwater.common.errors import StateError, TaskBundleRefused
from headwater.common.parsed_text import json_of
from headwater.common.settings.schema import ClientSettings
from headwater.common.system.atomic_file import write_atomically
from headwater.common.system.console import print_table, print_text
from headwater.common.task_bundles.requirements import check_requirements
from headwater.common.task_bundles.signed_bundle import FOLDER, TaskBundle, read_bundle, unpacked
from headwater.common.user_code.task_spec import BUNDLE

INDEX = "tasks.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTask:
    """A bundle that this device has taken."""

    name: str
    version: int
    digest: str
    signer: str
    since: str
    """When it was first taken, in UTC."""


def kept_tasks(state: Path) -> list[KeptTask]:
    """Return all bundles that the device has taken, in that order.

    Raises:
        StateError: the list cannot be read.
    """
    path = state / FOLDER / INDEX
    try:
        return [KeptTask(**row) for row in json_of(path.read_text())] if path.exists() else []
    except (OSError, ValueError, TypeError) as error:
        raise StateError(
            f"{path} cannot be read: {error}",
            remedy="restore it from a backup; without it an older task would be taken again",
        ) from error


def taken(data: bytes, device: ClientSettings) -> tuple[TaskBundle, str]:
    """Check a bundle that a server has sent, keep it, and return it with the task's place.

    Raises:
        TaskBundleRefused: the owner does not take it; says why.
        StateError: the state folder cannot be read or written.
    """
    bundle = read_bundle(data)
    kept = kept_tasks(device.state_folder)
    check_offer(bundle, device, kept)
    folder = device.state_folder / FOLDER
    try:
        spec = unpacked(bundle, folder)
        if bundle.digest not in {one.digest for one in kept}:
            now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
            kept = [*kept, _row(bundle, now)]
            rows = [asdict(one) for one in kept]
            write_atomically(folder / INDEX, json.dumps(rows, indent=1).encode())
    except OSError as error:
        raise StateError(f"{folder}: {error.strerror}") from error
    return bundle, spec


def last_spec(device: ClientSettings) -> str | None:
    """Return the place of the last task taken that the owner takes still; None if there is none.

    Its files are made the signed ones again.

    Raises:
        StateError: the state folder cannot be read or written.
        TaskBundleRefused: the file of the last one was changed.
    """
    kept, folder = kept_tasks(device.state_folder), device.state_folder / FOLDER
    pinned = device.pin_task or ""
    for one in reversed(kept):
        if one.signer in device.trusted_signers and one.digest.startswith(pinned):
            try:
                data = (folder / one.digest[:32] / BUNDLE).read_bytes()
                bundle = read_bundle(data)
                check_offer(bundle, device.model_copy(update={"pin_task": one.digest}), kept)
                return unpacked(bundle, folder)
            except OSError as error:
                raise StateError(f"{error.filename or folder}: {error.strerror}") from error
    return None


def _row(bundle: TaskBundle, since: str) -> KeptTask:
    content = bundle.content
    return KeptTask(
        name=content.name,
        version=content.version,
        digest=bundle.digest,
        signer=bundle.signer,
        since=since,
    )


def check_offer(bundle: TaskBundle, device: ClientSettings, kept: list[KeptTask]) -> None:
    """Check that the owner takes a bundle; ``kept`` are those that the device has.

    Raises:
        TaskBundleRefused: the owner does not; says why.
    """
    title, pinned = bundle.title, device.pin_task
    if bundle.signer not in device.trusted_signers:
        raise TaskBundleRefused(
            f"the server's task {title} is signed by {bundle.signer}, whom this device does not "
            "trust",
            remedy="ask your operator for their key, by another way than this server; if it is "
            "this one, start the client with --trust and the key",
        )
    if pinned is not None and not bundle.digest.startswith(pinned):
        raise TaskBundleRefused(
            f"the server's task {title} has the digest {bundle.digest[:16]}..., and this device "
            f"takes {pinned[:16]} alone",
            remedy=f"look at it, and set --pin-task {bundle.digest[:16]} if you take it",
        )
    same = [one for one in kept if (one.name, one.signer) == (bundle.content.name, bundle.signer)]
    newest = max((one.version for one in same), default=0)
    if pinned is None and bundle.content.version < newest:
        raise TaskBundleRefused(
            f"the server's task {title} is older than the version {newest} that this device has "
            "had of its signer",
            remedy="ask the operator to publish the older files as a new version, or set "
            f"--pin-task {bundle.digest[:16]}",
        )
    twice = [one for one in same if one.version == bundle.content.version]
    if any(one.digest != bundle.digest for one in twice):
        raise TaskBundleRefused(
            f"the server's task {title} has other files than the one of the same version that this "
            "device has",
            remedy="ask the operator to publish it as a new version",
        )
    check_requirements(bundle.content.requires, title=title)


def show(device: ClientSettings, *, as_json: bool) -> None:
    """Print the bundles that the device has taken.

    Raises:
        StateError: the list cannot be read.
    """
    kept = kept_tasks(device.state_folder)
    if as_json:
        for one in kept:
            typer.echo(json.dumps(asdict(one)))
        return
    if not kept:
        print_text("this device has taken no task from a server")
        return
    table = Table(box=SIMPLE_HEAD)
    for title in ("task", "version", "digest", "signer", "since", ""):
        table.add_column(title, overflow="fold")
    for one in kept:
        is_trusted = one.signer in device.trusted_signers
        note = "" if is_trusted or not device.trusted_signers else "signer not trusted"
        table.add_row(
            *(one.name, str(one.version), one.digest[:16], one.signer, one.since[:10], note)
        )
    print_table(table)
    if not device.trusted_signers:
        print_text("no signer is trusted here: --trust is not set, nor trust in a file of --config")
