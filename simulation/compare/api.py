"""``headwater.compare``: ways to train at the same cost, from a notebook or a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from headwater.common.errors import HeadwaterError, SettingsError
from headwater.common.parsed_text import json_of
from headwater.common.settings.keywords import Call, GivenSettings, api_function
from headwater.common.system.caller_state import caller_state, one_run_at_a_time
from headwater.common.system.portability import num_usable_cores
from headwater.simulation.compare.command import DEFAULT_OUT, run_comparison
from headwater.simulation.compare.record import RECORD


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """How the ways to train stood at the end; ``record`` has all that the tables show."""

    advice: str | None
    """Which to take, in a sentence; None while none has reached a target."""
    metric: str
    target: float | None
    """The value of the metric whose cost counts."""
    flags: Mapping[str, str]
    """The flags of each way, by its name, with the rate that suited it."""
    folder: Path
    """Where the runs are, the plot, ``compare.json`` and the best settings, ``best.toml``."""
    record: Mapping[str, Any] = field(repr=False)

    @staticmethod
    def of(folder: Path) -> Compared:
        """Return what a comparison left in its folder."""
        record = json_of((folder / RECORD).read_text(encoding="utf-8"))
        return Compared(
            advice=record["advice"],
            metric=record["metric"],
            target=record["target"],
            flags={one["name"]: one["flags"] for one in record["algorithms"] if one["flags"]},
            folder=folder,
            record=record,
        )

    def __str__(self) -> str:
        """Return the advice."""
        return self.advice or f"no way reached a {self.metric} that others could be held to"


@api_function
def compare(
    task: str | Path,
    *,
    budget: str | None = None,
    seeds: Sequence[int] | None = None,
    quick: bool = False,
    metric: str | None = None,
    target: float | None = None,
    jobs: int | None = None,
    clients: int | None = None,
    data: str | Path | None = None,
    partition: str | None = None,
    fleet: str | Path | None = None,
    effective_batch_size: int | None = None,
    accumulation_steps: int | None = None,
    micro_batch_size: int | None = None,
    optimizer: str | None = None,
    threads: int | None = None,
    out: str | Path | None = None,
    settings: GivenSettings = None,
    progress: bool = True,
    **flags: Any,
) -> Compared:
    """Compare exact steps and local training on a task, as ``headwater compare`` does.

    Exact steps, FedAvg, FedProx and DiLoCo each get a short search for the learning rate, then a
    run for each seed, in processes of their own. The same call again runs only what is missing.

    Args:
        task: ``FILE.py:Class``, as for ``--task``: other processes load it.
        budget: what each may use: ``rounds=N``, ``bytes=N``, ``examples=N`` or ``seconds=N``; not
            given: 50 rounds, 24 of a quick comparison.
        seeds: those of each; not given: 0, 1 and 2, or 0 of a quick one.
        quick: answer soon: three rates each, and then runs of exact steps and of the best others.
        metric: the one to compare by, or min:NAME or max:NAME where the name does not tell which
            values are better; not given: test_accuracy, test_loss or loss.
        target: the value of the metric whose cost counts; not given: nearly the best.
        jobs: runs at a time; not given: the usable cores.
        clients: number of simulated clients.
        data: one file or folder a client, as in ``devices/*.csv``.
        partition: how to split one data set: iid, dirichlet:0.3, labels:2 ... (docs/data.md).
        fleet: TOML file of the clients' speed, memory and links (docs/fleet.md).
        effective_batch_size: examples per round over the whole cohort.
        accumulation_steps: K, the micro-batches per update.
        micro_batch_size: examples per micro-batch.
        optimizer: class of torch.optim with which the server takes exact steps.
        threads: of torch, of each run.
        out: folder of the runs; not given: runs/compare.
        settings: all other settings that the runs share, by dotted keys, or a TOML file.
        progress: print the plan, the progress and the tables.
        flags: every other flag of ``headwater simulate`` that a comparison does not choose.

    Raises:
        SettingsError: a setting is wrong, or one that a comparison chooses; or the task is an
            object of this process.
        HeadwaterError: runs have failed: those that ended are kept, and the same call goes on; or
            see ``headwater.common.errors``.
    """
    arguments = locals()  # nothing but the arguments so far
    for name in ("budget", "seeds", "quick", "metric", "target", "jobs"):
        del arguments[name]
    call = Call("compare", {**arguments, "out": None})
    if call.objects:
        raise SettingsError(
            "a comparison's runs are processes of their own, which do not have this object",
            remedy="name the task by its file: 'my_task.py:MyTask'",
        )
    folder = DEFAULT_OUT if out is None else Path(out)
    with one_run_at_a_time(), caller_state(is_silent=not progress):
        try:
            is_done = run_comparison(
                call.file,
                overrides=call.given,
                budget=budget,
                seeds=None if seeds is None else list(seeds),
                is_quick=quick,
                metric=metric,
                target=target,
                jobs=jobs or num_usable_cores(),
                out=folder,
            )
        except typer.Exit as stopped:
            raise KeyboardInterrupt from stopped
    if not is_done:
        raise HeadwaterError(f"some runs in {folder} have failed", remedy="call it again")
    return Compared.of(folder)
