"""Runs the subcommands of ``headwater-client`` with the settings that ``cli.py`` has read.

Each function imports what it needs: torch comes with the task, gRPC with the connection, and an
idle device holds no module of the other subcommands in memory.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

if TYPE_CHECKING:
    from headwater.client.operations.activity import Activity
    from headwater.client.operations.counters import Counters
    from headwater.client.trainer.trainer import Trainer
    from headwater.client.training.context import Identity
    from headwater.client.transport.lasting_connection import Connection
    from headwater.common.settings.schema import Settings


def join_with(
    token_file: Path | None, folder: Path, *, trust: str | None, has_argument: bool
) -> None:
    """Join with a file's token (None: of the standard input), and print how to start the client.

    ``trust`` is the key of the signer whose tasks the device takes from its server.

    Raises:
        TokenInArguments: the token, or anything else, was an argument.
        SettingsError: the file cannot be read.
        HeadwaterError: see ``client.enrolment.join.join``.
    """
    from headwater.client.enrolment.join import CLOCK_SECONDS, SETTINGS_FILE, join
    from headwater.common.errors import TokenInArguments
    from headwater.common.settings.machines import check_signers
    from headwater.common.system.console import console, stderr
    from headwater.common.transport.join_token import JoinToken

    if has_argument:
        raise TokenInArguments("join takes no argument: a join token there can be read by others")
    check_signers(trust)
    token = JoinToken.parse(_token_text(token_file))
    joined = join(token, folder, trust=trust)
    how = "has joined" if joined.is_new else "is already enrolled, with this token"
    console.print(
        f"{joined.name} {how}: its certificate ends on {joined.expires_at:%Y-%m-%d}, and is "
        "renewed before then while the device takes part",
        soft_wrap=True,
    )
    for path in joined.files:
        console.print(f"  {path}", soft_wrap=True)
    if trust is not None and not joined.is_new and not _names_signer(folder, trust):
        stderr.print(
            f"--trust is not written to {folder / SETTINGS_FILE}, which is as it was: change "
            f'trust = "KEY" below [client] there',
            soft_wrap=True,
            markup=False,
        )
    off = joined.clock_off_seconds
    if abs(off) > CLOCK_SECONDS:
        where = "ahead of" if off > 0 else "behind"
        stderr.print(f"this machine's clock is {abs(off):.0f} s {where} the server's: set it")
    config = folder / SETTINGS_FILE
    program = "headwater-client" if shutil.which("headwater-client") else sys.argv[0]
    command = shlex.join([program, "--config", str(config)])
    what = "the task and the data are" if trust is None else "the data are"
    console.print(f"Start it with this, once {what} in that file", soft_wrap=True)
    where = '(data = "FOLDER" below [client]; the task comes from the server):'
    if trust is None:
        where = '(task = "my_task.py:MyTask" at its top, data = "FOLDER" below [client]):'
    console.print(where, soft_wrap=True, markup=False)
    console.print(f"  {command}", soft_wrap=True, markup=False)


def _names_signer(folder: Path, trust: str) -> bool:
    """Return whether the settings file of an enrolled device has this signer's key."""
    from headwater.client.enrolment.join import SETTINGS_FILE

    file = folder / SETTINGS_FILE
    return file.is_file() and trust in file.read_text(errors="replace")


def _token_text(file: Path | None) -> str:
    """Return the text of a token file; None or ``-`` is the standard input.

    Raises:
        SettingsError: the file cannot be read.
    """
    import getpass

    from headwater.common.errors import SettingsError

    if file is None or str(file) == "-":
        is_typed = sys.stdin is not None and sys.stdin.isatty()
        return getpass.getpass("join token: ") if is_typed else sys.stdin.read(4096)
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.read(4096)
    except OSError as error:
        raise SettingsError(
            f"--token-file {file}: {error.strerror}",
            remedy="save the token that `headwater-server enroll NAME` printed to this file",
        ) from error


def show_tasks(settings: Settings, *, as_json: bool) -> None:
    """List the task bundles that this device has taken.

    Raises:
        StateError: the list cannot be read.
    """
    from headwater.client.task_bundles.kept_tasks import show

    show(settings.client, as_json=as_json)


def show_identity(settings: Settings) -> None:
    """Print this device's line of the allow-list; make its identity if it has none."""
    from headwater.client.device.host_name import host_name
    from headwater.client.enrolment.signing_identity import make_identity
    from headwater.common.errors import SettingsError
    from headwater.common.system.console import stderr

    path = settings.secure.identity
    if path is None:
        raise SettingsError("no identity file is set", remedy="name it with --identity FILE")
    found, is_new = make_identity(path, settings.client.name or host_name())
    if is_new:
        stderr.print(
            f"made {path}: keep the file on this device, and copy the line to all other devices"
        )
    typer.echo(found.line)


def check_task(settings: Settings) -> None:
    """Run the task on this device's data, and print what the device measures of itself."""
    _check_room_for_torch(settings)
    from headwater.client.operations.task_check import show_task_check

    trainer, identity = _open(settings)
    show_task_check(settings, trainer, identity)
    if settings.algorithm.name is not None:
        from headwater.common.system.console import console

        label, number = settings.algorithm.label, trainer.image.layout.num_parameters
        text = f"client algorithm {label}: it makes a finite vector of {number:,} values"
        console.print(text, soft_wrap=True, markup=False)
    if settings.feature.name is not None:
        from headwater.common.own_feature.found import own_features
        from headwater.common.system.console import console

        for place, found in zip(
            settings.feature.names, own_features(settings.feature), strict=True
        ):
            side = "" if found.device is not None else ", nothing on a device"
            text = f"feature {place}: found{side}; it is tried in the first round"
            console.print(text, soft_wrap=True, markup=False)


def run_doctor(settings: Settings) -> None:
    """Print what could keep this device from taking part; exit with 1 if there is a fault."""
    _check_room_for_torch(settings)
    from headwater.client.operations.doctor import examine
    from headwater.client.operations.findings import show

    if not show(examine(settings, _open)):
        raise typer.Exit(1)


def _check_room_for_torch(settings: Settings) -> None:
    """Check that the device's memory has room for torch, which would be killed otherwise.

    Raises:
        OutOfMemory: it has not.
    """
    from headwater.client.memory.peak_model import resident_bytes
    from headwater.client.memory.process_limits import MemoryLimits, check_import_room

    limits = MemoryLimits(settings.client.memory_limit_bytes)
    check_import_room(resident_bytes(), limits.lowest())


def _open(settings: Settings) -> tuple[Trainer, Identity]:
    """Load the task and name this device, before it connects.

    Raises:
        OutOfMemory: the task's model does not fit in the device's memory.
        HeadwaterError: see ``run_trainer``.
    """
    from headwater.client.device.hardware import this_machine
    from headwater.client.trainer.run_trainer import run_trainer

    _begin(settings)
    settings = _with_opened_task(settings)
    identity = _identity(settings)
    trainer = run_trainer(settings)
    trainer.machine = this_machine(identity, settings, trainer.image.layout)
    return trainer, identity


def _begin(settings: Settings) -> None:
    """Set torch's threads."""
    import torch

    from headwater.client.device.hardware import ThisMachine
    from headwater.common.system.heap import use_one_heap

    use_one_heap()  # before the thread that trains begins
    torch.set_num_threads(settings.threads or max(int(ThisMachine().cores()), 1))


def _identity(settings: Settings) -> Identity:
    """Return which device this is, and which examples are its own.

    Raises:
        MissingData, SettingsError: there is no such path, or no such part.
    """
    from headwater.client.device.host_name import host_name
    from headwater.client.training.context import Identity
    from headwater.common.errors import SettingsError
    from headwater.common.task import check_data_exists

    device = settings.client
    check_data_exists(device.data)
    if device.part >= device.num_parts:
        raise SettingsError(
            f"--part: expected 0 to {device.num_parts - 1} of --num-parts {device.num_parts}, "
            f"found {device.part}",
            remedy="number the devices' parts from 0",
        )
    return Identity(
        name=device.name or host_name(),
        data=device.data,
        part=device.part,
        num_parts=device.num_parts,
        rule=settings.partition.rule(seed=settings.seed),
        labels=device.labels,
    )


def adapt(
    settings: Settings,
    training: Mapping[str, Any],
    *,
    model: Path,
    out: Path,
    local: Path | None,
    as_json: bool,
) -> None:
    """Fine-tune a released model on this device's data; ``training`` is a ``FineTuning``.

    Raises:
        HeadwaterError: see ``client.adaptation.command.show_adaptation``.
    """
    _check_room_for_torch(settings)
    from headwater.client.adaptation.command import show_adaptation
    from headwater.client.adaptation.fine_tuning import FineTuning

    _begin(settings)
    chosen = FineTuning(seed=settings.seed, **training)
    identity = _identity(settings)
    show_adaptation(settings, identity, chosen, model=model, out=out, local=local, as_json=as_json)


def predict(
    settings: Settings,
    *,
    model: Path,
    out: Path | None,
    local: Path | None,
    form: Literal["csv", "jsonl"] | None,
) -> None:
    """Write what the task predicts of this device's data.

    Raises:
        HeadwaterError: see ``client.adaptation.command.write_predictions``.
    """
    _check_room_for_torch(settings)
    from headwater.client.adaptation.command import write_predictions

    _begin(settings)
    identity = _identity(settings)
    write_predictions(settings, identity, model=model, out=out, local=local, form=form)


def _with_opened_task(settings: Settings) -> Settings:
    """Return settings that name a bundle's file with the place of its task.

    Raises:
        TaskBundleRefused, UnknownTask: see ``signed_bundle.with_opened_task``.
    """
    if not settings.has_task_bundle:
        return settings
    from headwater.common.task_bundles.signed_bundle import with_opened_task

    return with_opened_task(settings)


def take_part(settings: Settings) -> None:
    """Take part until the run ends, the device is asked to stop, or its patience ends."""
    import asyncio

    _check_room_for_torch(settings)
    from headwater.client.transport.lasting_connection import stay_connected

    settings = _with_opened_task(settings)
    if settings.task is None and settings.client.trust is not None:
        settings = _with_first_task(settings)

    def run(connection: Connection, seconds: float) -> None:
        asyncio.run(stay_connected(connection, stay=settings.client.stay, after_seconds=seconds))

    keep_part(settings, run)


def _with_first_task(settings: Settings) -> Settings:
    """Return the settings with the task that the server hands out, signed by whom they trust."""
    from headwater.client.operations.installed_tasks import loaded_bundle
    from headwater.client.transport.first_task import first_task
    from headwater.common.system.console import console

    console.print(f"asks {settings.client.server} for a task", soft_wrap=True)
    title, spec = first_task(settings)
    settings = settings.model_copy(update={"task": spec})
    digest = loaded_bundle(settings)
    text = f"task {title}, {digest[:16]}, signed by a trusted signer: {spec}"
    console.print(text, soft_wrap=True, markup=False)
    return settings


def keep_part(settings: Settings, run: Callable[[Connection, float], None]) -> None:
    """Run a connection, and one more for each task of this device that a server goes on with.

    ``run`` runs a connection to its end, after so many seconds.

    Raises:
        KeyboardInterrupt: the device is to stop at once; it says "stopped" if it was
            connected.
        HeadwaterError: see ``Connection.run``.
    """
    from contextlib import ExitStack

    from headwater.client.device.worker_processes import workers_of_a_fork_server
    from headwater.client.features import warn_of_untried
    from headwater.client.operations.installed_tasks import with_task
    from headwater.client.transport.retry_policy import TaskChanges
    from headwater.client.transport.stream import OtherTaskOffered
    from headwater.common.system.console import console

    warn_of_untried(settings)
    connection: Connection | None = None
    chosen: Settings | None = settings
    changes, seconds = TaskChanges(), 0.0
    with ExitStack() as beside_threads:
        while chosen is not None:
            offered: OtherTaskOffered | None = None
            try:
                with connection_of(chosen) as connection:
                    chosen = None
                    # The first data are open, and gRPC's threads begin.
                    beside_threads.enter_context(workers_of_a_fork_server())
                    run(connection, seconds)
                    is_early = connection.is_stopping and not connection.has_connected
                    end = "stopped before connecting" if is_early else "done"
                    console.print(f"{connection.name}: {end}", soft_wrap=True)
            except OtherTaskOffered as error:
                offered = OtherTaskOffered(error.name, error.spec)  # without frames
            except KeyboardInterrupt:
                if connection is not None and connection.has_connected:
                    raise KeyboardInterrupt("stopped") from None
                raise
            if offered is not None:
                assert connection is not None  # the offer came over it
                seconds = changes.wait_seconds(has_trained=connection.has_trained)
                chosen, connection = with_task(settings, offered.name, offered.spec), None
                console.print(f"goes on with the task {offered.name}", soft_wrap=True)
                _forget_trainer()  # not while an exception holds the frames that hold the model


def _forget_trainer() -> None:
    """Free the memory of the task that the device leaves, before it loads the next one."""
    import gc

    from headwater.client.trainer.run_trainer import trainer_of
    from headwater.common.system.heap import release_freed_memory

    trainer_of.cache_clear()
    gc.collect()
    release_freed_memory()


@contextmanager
def connection_of(settings: Settings) -> Iterator[Connection]:
    """Check the task, and yield the device's connection; meanwhile serve its metrics, if set."""
    import math

    from headwater.common.errors import StateError
    from headwater.common.system.command_line import check_addresses
    from headwater.common.transport.tls import split_addresses
    from headwater.common.transport.trusted_file import check_folder

    device = settings.client
    addresses = split_addresses(device.server)
    credentials = check_addresses(settings, *addresses, metrics=device.metrics)
    trainer, identity = _open(settings)
    secure = settings.secure
    requires_masks = secure.aggregation != "off"
    try:
        check_folder(device.state_folder)
    except OSError as error:
        raise StateError(f"the state folder {device.state_folder}: {error.strerror}") from error
    if requires_masks or secure.identity is not None or secure.allow_list is not None:
        from headwater.client.enrolment.signing_identity import check_enrolment

        check_enrolment(settings.secure, identity.name)
    # Before the check, which foresees the memory of training from what the process holds by then.
    from headwater.client.app import app as own_app
    from headwater.client.flower.node import Node
    from headwater.client.transport.lasting_connection import Connection
    from headwater.common.system.console import console
    from headwater.common.user_code.task_spec import short_code
    from headwater.common.wording import counted

    if requires_masks:
        from headwater.client.masked_rounds.masked_description import learn_metrics
    trainer.examples(identity)
    if settings.privacy.budget is not None:
        from headwater.client.privacy.budget_data import check_start

        check_start(trainer, identity, device.state_folder, settings.privacy)
    certificate, limits = None, None
    if credentials is not None:
        from headwater.client.enrolment.renewal import Renewal

        certificate = Renewal(settings.tls, credentials)
    if requires_masks:
        learn_metrics(trainer, identity)  # before any model of the server's
    node = Node(own_app, trainer, identity, settings, device.state_folder)
    if device.active_hours is not None or device.bytes_per_day is not None:
        from headwater.client.energy.availability import availability_of

        limits = availability_of(device, identity.name, trainer.image.layout)
    connection = Connection(
        node,
        addresses,
        certificate=certificate,
        limits=limits,
        patience_seconds=math.inf if device.stay else device.patience_seconds,
    )
    examples = counted(len(trainer.examples(identity)), "example")
    task = short_code(trainer.task_code)
    with _metrics(settings, node.counters), _display(node.activity):
        # Last: whoever has read it may stop the device, and no import is cut in the middle.
        console.print(
            f"{identity.name}: {examples}, task {task}, server {device.server}", soft_wrap=True
        )
        yield connection


@contextmanager
def _display(activity: Activity) -> Iterator[None]:
    """Show what the client does: in a terminal one line, elsewhere lines at a sane rate."""
    import time

    from headwater.client.operations.display import LONGEST_SILENCE_SECONDS, ClientDisplay
    from headwater.common.system.console import console
    from headwater.common.system.live_status import LineSchedule, LiveStatus

    display = ClientDisplay(activity)
    schedule = LineSchedule(start=time.monotonic(), longest_silence_seconds=LONGEST_SILENCE_SECONDS)
    with LiveStatus(
        console, block=display.block, wait_line=display.wait_line, schedule=schedule
    ) as status:
        activity.on_sent = lambda: status.event(display.sent_line)
        yield


@contextmanager
def _metrics(settings: Settings, counters: Counters) -> Iterator[None]:
    """Serve the metrics meanwhile, if an address is set."""
    if settings.client.metrics is None:
        yield
        return
    from headwater.client.device.sensors import Sensors
    from headwater.client.memory.process_limits import MemoryLimits
    from headwater.client.operations.prometheus import ClientMetrics
    from headwater.common.system.console import console
    from headwater.common.system.metrics_server import MetricsServer

    limits = MemoryLimits(settings.client.memory_limit_bytes)
    # Its own sensors: the training thread reads the device's.
    metrics = ClientMetrics(counters, Sensors().vitals, limits.lowest_bytes)
    server = MetricsServer(settings.client.metrics, metrics.registry)
    try:
        console.print(f"metrics at {server.url}", soft_wrap=True)
        yield
    finally:
        server.close()
