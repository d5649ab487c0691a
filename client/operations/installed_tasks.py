"""The tasks that are installed on a device, and the settings with which it goes on with another.

A server names the task of its run, and a device trains only what its owner has installed: the task
that it was started with, and those of ``client.tasks``. No code comes from the server.
"""

from __future__ import annotations

from pathlib import Path

from headwater.common.errors import TaskNotInstalled
from headwater.common.settings.fields import pairs_of
from headwater.common.settings.schema import Settings
from headwater.common.task_spec import name_of


def own_task(settings: Settings) -> str:
    """Return the name of the task that a device has loaded."""
    assert settings.task is not None
    by_spec = {spec: name for name, spec in pairs_of(settings.client.tasks).items()}
    return by_spec.get(settings.task) or name_of(settings.task)


def installed_tasks(settings: Settings) -> tuple[str, ...]:
    """Return the names of all tasks that a device may load; none if its owner lists none."""
    others = pairs_of(settings.client.tasks)
    return tuple(sorted({own_task(settings), *others})) if others else ()


def with_task(first: Settings, name: str) -> Settings:
    """Return the settings for another task; ``first`` are those that the device started with.

    Raises:
        TaskNotInstalled: it is none of the device's tasks.
    """
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
