"""Which of a device's examples are trained on, end the training early, and are tested on.

The model is tested on the examples that the run held out on this device, if its file says which:
neither the run nor the fine-tuning has trained on them. Of the rest a part tells when to stop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pydantic import ValidationError

from headwater.client.trainer.client_examples import held_out_of
from headwater.client.training.sampler import seed_of
from headwater.common.errors import SettingsError, TooFewExamples
from headwater.common.model.trained_model import ModelRecord
from headwater.common.settings.schema import EvaluationSettings
from headwater.common.task import Examples, Task
from headwater.common.wording import counted

OWN_SHARE = 0.2
"""Of the examples to test on, where the run held out none."""
STOP_SHARE = 0.2
"""Of the rest, by which the training ends; at least one example."""
MIN_HELD_OUT, MIN_REST = 2, 5


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutTerms:
    """Which examples a device holds out (``common.messages.HoldOut``)."""

    run_seed: int
    held_out_fraction: float
    held_out: str = "random"


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSplit:
    """Positions in a device's examples."""

    train: tuple[int, ...]
    stop: tuple[int, ...]
    held_out: tuple[int, ...]
    is_of_run: bool
    """Whether the run held the same examples out, and did not train on them."""

    def without(self, positions: set[int]) -> DataSplit:
        """Return the split without some examples."""
        train, stop, held_out = (
            tuple(one for one in part if one not in positions)
            for part in (self.train, self.stop, self.held_out)
        )
        return DataSplit(train=train, stop=stop, held_out=held_out, is_of_run=self.is_of_run)

    def check(self, name: str) -> None:
        """Check that there is enough to train on and to test on.

        Raises:
            TooFewExamples: there is not.
        """
        num_rest = len(self.train) + len(self.stop)
        if len(self.held_out) < MIN_HELD_OUT or num_rest < MIN_REST or not self.train:
            raise TooFewExamples(
                f"{name}: {counted(num_rest, 'example')} to train on and "
                f"{len(self.held_out):,} to test on; "
                f"expected at least {MIN_REST} and {MIN_HELD_OUT}"
            )


def terms_of(record: ModelRecord) -> HeldOutTerms | None:
    """Return what devices held out in the run of a model; None if they held out nothing.

    Raises:
        SettingsError: the file says something else than what a run writes.
    """
    told = record.settings.get("evaluation")
    if told is None:
        return None
    try:
        chosen = EvaluationSettings.model_validate(told)
    except ValidationError as error:
        raise SettingsError(
            f"the model's file says of held-out examples what no run writes: {error}",
            remedy="copy the file again from the run's folder",
        ) from error
    if not chosen.on_devices:
        return None
    return HeldOutTerms(
        run_seed=_seed_of(record),
        held_out_fraction=chosen.held_out_fraction,
        held_out=chosen.held_out,
    )


def _seed_of(record: ModelRecord) -> int:
    """Return the run's seed; 0 if the file does not say it."""
    seed = record.settings.get("seed")
    return seed if type(seed) is int else 0


def split_data(
    task: Task, examples: Examples, record: ModelRecord, *, name: str, seed: int
) -> DataSplit:
    """Split a device's examples; ``seed`` draws those that end the training, no others.

    So a model that is fine-tuned again, by another seed, is tested on the same examples.

    Raises:
        TooFewExamples: there is not enough to train on or to test on.
        MissingColumn, SettingsError: see ``held_out_of`` and ``terms_of``.
    """
    of_run = terms_of(record)
    terms = of_run or HeldOutTerms(run_seed=_seed_of(record), held_out_fraction=OWN_SHARE)
    held_out = held_out_of(task, examples, terms, name=name)
    rest = np.setdiff1d(np.arange(len(examples)), held_out)
    order = np.random.default_rng(seed_of("stop early", seed, name)).permutation(rest)
    num_stop = max(int(len(rest) * STOP_SHARE), 1)
    stop, train = sorted(order[:num_stop].tolist()), sorted(order[num_stop:].tolist())
    split = DataSplit(
        train=tuple(train), stop=tuple(stop), held_out=held_out, is_of_run=of_run is not None
    )
    split.check(name)
    return split
