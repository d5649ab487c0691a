"""``headwater.adapt``: a released model for one device's own data, from a notebook or a script."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path

import torch

from headwater.client.adaptation.adapt import Adapted, adapt_model, open_examples
from headwater.client.adaptation.fine_tuning import FineTuning
from headwater.client.adaptation.progress import show_progress
from headwater.client.adaptation.start_model import start_model
from headwater.client.device.hardware import ThisMachine
from headwater.client.device.host_name import host_name
from headwater.client.training.context import Identity
from headwater.common.errors import OutOfMemory
from headwater.common.settings.schema import ClientSettings
from headwater.common.system.caller_state import caller_state
from headwater.common.system.stop_signals import StopRequests, at_stop_signals
from headwater.common.task import Task, check_data_exists
from headwater.common.user_code.bundled_examples import expanded
from headwater.common.user_code.failures import is_allocation_failure
from headwater.common.user_code.run_scope import forget_changed_modules


def adapt(
    model: str | Path,
    task: Task | type[Task] | str | Path | None = None,
    *,
    data: str | Path | None = None,
    out: str | Path | None = None,
    only: str | None = None,
    local: str | Path | None = None,
    name: str | None = None,
    part: int = 0,
    num_parts: int = 1,
    optimizer: str = "adamw",
    learning_rate: float = 1e-3,
    epochs: int = 20,
    patience: int = 3,
    batch_size: int = 16,
    seed: int = 0,
    memory_limit: int | None = None,
    state: str | Path | None = None,
    threads: int | None = None,
    progress: bool = True,
) -> Adapted:
    """Fine-tune a released model on this device's data, as ``headwater-client adapt`` does.

    Nothing is sent. Both models are tested on the same held-out examples, and the better one is
    returned. In the main thread Ctrl-C ends the training, and the best so far is the result.

    Args:
        model: a run's folder, or its file.
        task: an object with a task's methods, its class, or ``FILE.py:Class``; not given: the one
            that the file names.
        data: the device's file or folder of examples.
        out: the folder that the better model is written to; not given: it is returned alone.
        only: patterns of the parameters to train, as in ``head.*``; not given: all.
        local: after ``--local-parameters``, the file in which the device kept its own; not given:
            it is looked for in the folder ``state``.
        name: the device's name in the run, by which the same examples are held out.
        part: the device's part of bundled data.
        num_parts: of bundled data.
        optimizer: one of ``torch.optim``.
        learning_rate: of the optimizer.
        epochs: at most.
        patience: epochs in a row without a better loss after which the training ends.
        batch_size: examples of a step.
        seed: equal seeds give equal bits, with as many threads.
        memory_limit: bytes that this process may use.
        state: the device's folder in the run; not given: ~/.local/state/headwater.
        threads: of torch; not given: as they are.
        progress: print how far it has come.

    Raises:
        HeadwaterError: see ``headwater.common.errors``.
    """
    chosen = FineTuning(
        optimizer=optimizer,
        learning_rate=learning_rate,
        epochs=epochs,
        patience=patience,
        batch_size=batch_size,
        seed=seed,
        only=only,
    )
    device = ClientSettings(
        memory_limit_bytes=memory_limit, state=None if state is None else expanded(state)
    )
    forget_changed_modules()
    with caller_state(is_silent=not progress):
        path = None if data is None else expanded(data)
        check_data_exists(path)
        if threads is not None:
            torch.set_num_threads(threads)
        return adapt_here(
            expanded(model),
            task() if isinstance(task, type) else task,
            Identity(name=name or host_name(), data=path, part=part, num_parts=num_parts),
            chosen,
            out=None if out is None else expanded(out),
            local=None if local is None else expanded(local),
            device=device,
            shows_progress=progress,
        )


def adapt_here(
    model: Path,
    task: Task | str | Path | None,
    identity: Identity,
    chosen: FineTuning,
    *,
    out: Path | None,
    local: Path | None,
    device: ClientSettings,
    shows_progress: bool = True,
) -> Adapted:
    """Load, fine-tune and test within the memory of the device; a stop signal ends the training.

    Raises:
        HeadwaterError: see ``start_model`` and ``adapt_model``.
    """
    machine = ThisMachine(device)
    start = start_model(
        model,
        task,
        local=local,
        states=device.state_folder,
        name=identity.name,
        limit=machine.limits.lowest,
    )
    examples = open_examples(start, identity)
    is_stopping = threading.Event()
    shown = show_progress(chosen.epochs) if shows_progress else nullcontext(lambda _: None)
    try:
        with at_stop_signals(StopRequests(is_stopping.set)), machine.bounded(), shown as on_step:
            return adapt_model(
                start,
                examples,
                chosen,
                name=identity.name,
                out=out,
                should_stop=is_stopping.is_set,
                on_step=on_step,
            )
    except Exception as error:
        if is_allocation_failure(error.__cause__ or error):
            raise OutOfMemory(
                "the model, two copies of what trains in it, and the optimizer's state do not fit "
                f"in the memory of the device: the limit is {machine.limits.lowest().origin}",
                remedy="give the device more memory, train fewer parameters with --only, or choose "
                "--optimizer sgd or a smaller --batch-size",
            ) from error
        raise
