"""The examples of a process's clients: opened once, split, and cut into the windows of plans."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from torch.utils.data import Subset

from headwater.client.training.context import Identity
from headwater.client.training.sampler import SamplerState, Window, held_out_positions, window
from headwater.common.additivity.opened_again import OTHER_SHARES, differs_again
from headwater.common.additivity.trial_state import random_state
from headwater.common.data.batches import SubsetView
from headwater.common.data.client_datasets import ClientDatasets
from headwater.common.data.example_faults import whole_of
from headwater.common.data.example_lengths import ExampleLengths, LengthRecord, length_record
from headwater.common.errors import CountOutOfRange
from headwater.common.messages import GROUP, HoldOut, Plan
from headwater.common.task import Examples, Task, open_train_examples

log = logging.getLogger(__name__)

MAX_OPEN_DATASETS = 20_000  # of clients; a simulated population may have any size
# The most examples of a window that uses some of them more than once: it is a list in memory.
MAX_REPEATED = 1 << 24

CheckOpened = Callable[[Examples, str], None]
"""Checks the examples that were opened for a client of this name; it raises what it finds."""


def held_out_of(task: Task, examples: Examples, terms: HoldOut, *, name: str) -> tuple[int, ...]:
    """Return the positions of the examples that the device ``name`` holds out.

    Raises:
        MissingColumn: whole groups are held out, and the examples have no such column.
    """
    groups_E = None
    if terms.held_out.startswith(GROUP):
        from headwater.common.data.columns import column_of

        groups_E = column_of(task, examples, terms.held_out.removeprefix(GROUP)).codes_E
    return held_out_positions(
        len(examples),
        fraction=terms.held_out_fraction,
        run_seed=terms.run_seed,
        name=name,
        is_last=terms.held_out == "last",
        groups_E=groups_E,
    )


class ClientExamples:
    """The examples of all clients of this process; those used last stay open."""

    def __init__(self, task: Task, check: CheckOpened) -> None:
        self.datasets = ClientDatasets(task)
        self._task = task
        self._check = check
        self._records: dict[int, LengthRecord] = {}
        self._reopened: dict[Identity, Examples] = {}
        self._is_opened_again = False  # once in a process, of a task that draws random numbers
        self._opened = functools.lru_cache(maxsize=MAX_OPEN_DATASETS)(self._open)

    def keep_open(self, num_clients: int) -> None:
        """Keep the examples of the last ``num_clients`` clients open."""
        if self._opened.cache_parameters()["maxsize"] != num_clients:
            self._opened = functools.lru_cache(maxsize=num_clients)(self._open)

    def of(self, identity: Identity) -> Examples:
        """Open a client's examples, once, and check them.

        Raises:
            EmptyDataset, MissingData: see ``headwater.common.errors``.
            MissingColumn, NoSuchPartition: see ``headwater.common.data.client_datasets``.
            HeadwaterError: the check failed.
        """
        return self._opened(identity)

    def reopen(self, identity: Identity) -> Examples:
        """Open a device's examples again and forget those of before; an error leaves these open.

        Raises:
            HeadwaterError: see ``of``.
        """
        self._reopened[identity] = self._open(identity)
        self._opened.cache_clear()
        self._records.clear()
        return self.of(identity)

    def _open(self, identity: Identity) -> Examples:
        if identity in self._reopened:
            return self._reopened.pop(identity)
        before = random_state()
        examples = self.datasets.of(
            identity.rule, data=identity.data, part=identity.part, num_parts=identity.num_parts
        )
        if not self._is_opened_again and random_state() != before:
            self._is_opened_again = True
            self._open_again(identity, examples)
        self._check(examples, identity.name)
        return examples

    def _open_again(self, identity: Identity, examples: Examples) -> None:
        """Log a warning if the task opens other examples a second time."""
        part, num_parts = identity.part, identity.num_parts
        if identity.rule is not None:
            part, num_parts = 0, 1
            examples = examples.whole if isinstance(examples, SubsetView) else examples
        again = open_train_examples(self._task, data=identity.data, part=part, num_parts=num_parts)
        if differs_again(examples, again):
            log.warning(OTHER_SHARES, type(self._task).__name__)

    def lengths(self, examples: Examples) -> ExampleLengths | None:
        """Return the lengths of a client's examples; None if these cannot differ in length.

        A data set's lengths are read once, while it is among those that were used last.

        Raises:
            TaskError, TaskFailed: see ``common.data.example_lengths.length_record``.
        """
        key = id(whole_of(examples))
        record = self._records.pop(key, None) or length_record(self._task, examples)
        if record is None:
            return None
        self._records[key] = record  # the record holds the data set, so its id stays its own
        if len(self._records) > self._opened.cache_parameters()["maxsize"]:
            del self._records[next(iter(self._records))]
        return ExampleLengths(examples, record)

    def split(self, identity: Identity, terms: HoldOut) -> tuple[Examples, Examples]:
        """Return the examples to train on and the held-out ones, by a plan or a request.

        Raises:
            MissingColumn: whole groups are held out, and the examples have no such column.
        """
        examples, fraction = self.of(identity), terms.held_out_fraction
        if fraction == 0:
            return examples, Subset(examples, [])  # type: ignore[arg-type]
        held_out = held_out_of(self._task, examples, terms, name=identity.name)
        rest = sorted(set(range(len(examples))) - set(held_out))
        return Subset(examples, rest), Subset(examples, held_out)  # type: ignore[arg-type]

    def window(
        self, identity: Identity, plan: Plan, sampler: SamplerState, order_seed: int | None = None
    ) -> tuple[Examples, Window]:
        """Return the client's training examples and the plan's window of them.

        ``order_seed`` replaces the run's seed in the order of the examples.

        Raises:
            CountOutOfRange: the plan asks for more examples than a device can list.
        """
        examples, _ = self.split(identity, plan)
        quota = plan.quota_of(len(examples))
        num_more = 0 if plan.uses_whole_window else plan.max_examples - plan.quota
        if quota > max(len(examples), MAX_REPEATED):
            raise CountOutOfRange(
                f"{identity.name}, round {plan.round}: the plan asks for {plan.quota:,} examples, "
                f"and the device has {len(examples):,}; with repetitions it gives at most "
                f"{MAX_REPEATED:,}"
            )
        return examples, window(
            sampler.next_place,
            quota=quota,
            num_more=num_more,
            run_seed=plan.run_seed if order_seed is None else order_seed,
            name=identity.name,
            num_examples=len(examples),
        )

    def numbers(
        self, identity: Identity, plan: Plan, sampler: SamplerState, order_seed: int
    ) -> tuple[int, ...]:
        """Return the numbers, in the client's whole data, of the examples of a plan's window.

        ``sampler`` is settled (``SamplerState.settle``).

        Raises:
            CountOutOfRange: the plan asks for more examples than a device can list.
        """
        examples, chosen = self.window(identity, plan, sampler, order_seed)
        if plan.held_out_fraction == 0 or not isinstance(examples, Subset):
            return chosen.positions
        return tuple(examples.indices[position] for position in chosen.positions)
