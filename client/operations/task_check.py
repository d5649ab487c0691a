"""``headwater-client check``: tries the task on this device and prints memory use and speed."""

from __future__ import annotations

from collections.abc import Iterator

from rich.filesize import decimal

from headwater.client.device.hardware import ThisMachine
from headwater.client.device.sensors import readings
from headwater.client.memory.peak_model import resident_bytes
from headwater.client.operations.memory_table import (
    Part,
    check_fits,
    parts_at_rest,
    parts_of_training,
    rough,
    what_makes_it_fit,
)
from headwater.client.operations.round_forecast import forecast
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.settings.schema import Settings
from headwater.common.system.console import console
from headwater.common.system.heap import release_freed_memory
from headwater.common.system.printable import printable, printable_lines


def show_task_check(settings: Settings, trainer: Trainer, identity: Identity) -> None:
    """Try the task on this device's data, and print the results.

    Raises:
        HeadwaterError: the task does not run, its loss is not a sum, or it does not fit.
    """
    examples = trainer.examples(identity)
    console.print(f"task        {printable(settings.task)}", markup=False)
    console.print(f"examples    {len(examples):,}")
    console.print(
        f"model       {trainer.image.layout.num_parameters:,} parameters, "
        f"{decimal(trainer.image.layout.num_bytes)}"
    )
    layout = trainer.image.layout
    if layout.frozen:
        console.print(
            f"frozen      {decimal(layout.num_frozen_bytes)}: received at most once, and kept",
            soft_wrap=True,
        )
    if layout.local:
        console.print(
            f"stay here   {layout.num_local:,} parameters more ({trainer.local_parameters}): they "
            "are trained on this device and sent nowhere",
            soft_wrap=True,
            markup=False,
        )
    hardware = ThisMachine(settings.client)
    release_freed_memory()
    at_rest = parts_at_rest(trainer, resident_bytes())
    console.print("at rest     memory that is taken before any example:")
    for part in at_rest:
        console.print(part.line, soft_wrap=True, markup=False)
    report = trainer.check(examples, identity.name)
    if report.num_seen:
        console.print("loss        is a sum over examples, and so are its metrics and gradients")
    for note in report.notes:
        console.print(f"note        {printable_lines(note)}", soft_wrap=True, markup=False)
    if report.left_out is not None:
        console.print(
            f"left out    {printable_lines(report.left_out)}", soft_wrap=True, markup=False
        )
    for topic, text in measurements(settings, trainer, identity, hardware):
        console.print(f"{topic:<11} {printable(text)}", soft_wrap=True, markup=False)
    _show_training_memory(settings, trainer, identity, hardware, at_rest)


def _show_training_memory(
    settings: Settings,
    trainer: Trainer,
    identity: Identity,
    hardware: ThisMachine,
    at_rest: list[Part],
) -> None:
    """Print what training adds to the memory at rest, and what makes it fit.

    Raises:
        OutOfMemory: one example does not fit.
    """
    known, fitting = hardware.memory.known, hardware.memory.fitting(1)
    assert known is not None  # the speed was measured
    assert fitting is not None
    context = trainer.context(trainer.examples(identity), identity.name, hardware)
    console.print("training    memory that a micro-batch adds:")
    for part in parts_of_training(
        at_rest,
        known,
        trainer.checkpointed.footprint,
        num_tokens=None if context.lengths is None else context.lengths.usual,
        has_algorithm=settings.algorithm.name is not None,
        is_masked=settings.secure.aggregation != "off",
    ):
        console.print(part.line, soft_wrap=True, markup=False)
    check_fits(identity.name, known, hardware.limits.lowest(), fitting)
    console.print(f"fits        {what_makes_it_fit(trainer, fitting)}", soft_wrap=True)


def measurements(
    settings: Settings, trainer: Trainer, identity: Identity, hardware: ThisMachine
) -> Iterator[tuple[str, str]]:
    """Yield memory, speed, a round's share, sensors and time share, as topics and texts."""
    lowest = hardware.limits.lowest()
    yield "memory", f"up to {decimal(lowest.num_bytes)}, by {lowest.origin}"
    speed, cores = trainer.measure(identity, hardware), hardware.cores()
    line, fitting = hardware.memory.line, hardware.memory.fitting(1)
    if line is not None and fitting is not None:
        yield (
            "",
            f"{decimal(int(line.base))} + {decimal(int(line.each))} per example of a "
            f"micro-batch: {rough(fitting)} fit",
        )
    lengths = trainer.lengths(identity)
    if line is not None and lengths is not None:
        yield (
            "",
            f"{decimal(int(line.each / lengths.usual))} per token: an example has usually "
            f"{lengths.usual:,}",
        )
    yield (
        "speed",
        f"{speed.seconds_per_micro_batch * 1e3:,.2f} ms per micro-batch + "
        f"{speed.seconds_per_example * 1e3:,.3f} ms per example, "
        f"{cores:g} core{'' if cores == 1 else 's'}",
    )
    fastest = speed.fastest_micro_batch_size
    yield (
        "",
        "fastest in the largest micro-batches that were tried"
        if fastest is None
        else f"fastest in micro-batches of {fastest:,}",
    )
    yield from forecast(settings, trainer, identity, hardware, speed)
    found = trainer.precision.compare(identity)
    if found is not None:
        yield "precision", f"{found.fastest} under --precision auto: {found}"
    yield "sensors", ", ".join(readings(hardware.vitals())) or "none"
    gives = hardware.time_share()
    yield (
        "gives",
        f"{gives.share:.0%} of its time: {gives.reason}" if gives.share < 1 else "all of its time",
    )
