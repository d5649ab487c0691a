"""The tasks that are installed on a device, and the settings with which it goes on with another.

A server names the task of its run, and a device trains only what its owner has installed: the task
that it was started with, and those of ``client.tasks``. No code comes from the server,
but what is signed by whom the owner trusts (``client.task_bundles``).
"""

from __future__ import annotations

from pathlib import Path

from headwater.common.errors import TaskNotInstalled
from headwater.common.settings.fields import pairs_of
from headwater.common.settings.schema import Settings
from headwater.common.user_code.task_spec import name_of

NO_BUNDLE = "none"
"""What a device says that trusts a signer and has none of its tasks loaded."""


def own_task(settings: Settings) -> str:
    """Return the name of the task that a device has loaded."""
    assert settings.task is not None
    by_spec = {spec: name for name, spec in pairs_of(settings.client.tasks).items()}
    return by_spec.get(settings.task) or name_of(settings.task)


def installed_tasks(settings: Settings) -> tuple[str, ...]:
    """Return the names of all tasks that a device may load; none if its owner lists none."""
    others = pairs_of(settings.client.tasks)
    return tuple(sorted({own_task(settings), *others})) if others else ()


def loaded_bundle(settings: Settings) -> str:
    """Return the digest of the bundle that the loaded task is of, or ``NO_BUNDLE``.

    Empty if the owner trusts no signer: such a device takes no task from a server.

    Raises:
        TaskBundleRefused: the files of the task were changed since.
    """
    if settings.client.trust is None:
        return ""
    from headwater.common.task_bundles.signed_bundle import bundle_of

    found = None if settings.task is None else bundle_of(settings.task)
    return NO_BUNDLE if found is None else found.digest


def task_in(data: bytes, settings: Settings) -> tuple[str, str]:
    """Return the title and the place of the task in a bundle that a server has sent, and keep it.

    Raises:
        TaskBundleRefused, StateError: see ``client.task_bundles.kept_tasks.taken``.
    """
    from headwater.client.task_bundles.kept_tasks import taken  # few devices trust a signer

    bundle, spec = taken(data, settings.client)
    return bundle.title, spec


def with_task(first: Settings, name: str, spec: str | None = None) -> Settings:
    """Return the settings for another task; ``first`` are those that the device started with.

    ``spec`` is its place, if a server has just handed it out.

    Raises:
        TaskNotInstalled: it is none of the device's tasks.
    """
    if spec is not None:
        return first.model_copy(update={"task": spec})
    if name == own_task(first):
        return first
    device, tasks = first.client, pairs_of(first.client.tasks)
    if name not in tasks:
        raise TaskNotInstalled(
            f"the server's run has the task {name[:100]!r}; this device has "
            f"{', '.join(installed_tasks(first)) or own_task(first)}"
        )
    data = pairs_of(device.task_data).get(name)
    update = {
        "data": device.data if data is None else Path(data),
        "tasks": f"{own_task(first)}={first.task},{device.tasks}",  # it may return to the first
    }
    client = device.model_copy(update=update)
    return first.model_copy(update={"task": tasks[name], "client": client})
