"""Fine-tunes a released model on this device, tests it against the common one, keeps the better.

Both are tested on the same examples, on which nothing was trained. Nothing goes over a network.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from headwater.client.adaptation.comparison import Comparison, compare, tested_sums
from headwater.client.adaptation.data_split import split_data
from headwater.client.adaptation.fine_tuning import (
    FineTuning,
    TrainingState,
    chosen_parameters,
    fine_tune,
    put,
)
from headwater.client.adaptation.saved_model import prepare_folder, save_model
from headwater.client.adaptation.start_model import StartModel
from headwater.client.training.context import Identity
from headwater.common.data.batches import SubsetView
from headwater.common.data.client_datasets import ClientDatasets
from headwater.common.data.evaluation import evaluate_sums
from headwater.common.data.example_faults import short_summary
from headwater.common.system.json_logs import to_json_value
from headwater.common.task import Examples
from headwater.common.user_code.failures import running


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted:
    """The result: the better model, and how both did on the held-out examples."""

    name: str
    """The device's."""
    model: nn.Module
    """The better one, in evaluation mode."""
    is_adapted: bool
    """Whether that is the fine-tuned one."""
    found: Comparison
    """The common model first, then the fine-tuned one."""
    is_held_out_by_run: bool
    """Whether the run held these examples out. If not, it may have trained on them."""
    num_trained: int
    """Examples that were trained on, without those that end the training."""
    num_unusable: int
    """Examples that are left out, as the common model has no finite loss on them."""
    why_unusable: str
    training: TrainingState
    file: Path | None = None
    """Where the model was written."""

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain data; what is no finite number is None."""
        found: dict[str, Any] = to_json_value(
            {
                "kept": "fine-tuned" if self.is_adapted else "common",
                **asdict(self.found),
                "is_within_chance": self.found.is_within_chance,
                "name": self.name,
                "is_held_out_by_run": self.is_held_out_by_run,
                "num_trained": self.num_trained,
                "num_unusable": self.num_unusable,
                "training": asdict(self.training),
            }
        )
        return found


def open_examples(start: StartModel, identity: Identity) -> Examples:
    """Open a device's examples.

    Raises:
        MissingData, EmptyDataset, HeadwaterError: see ``ClientDatasets.of``.
    """
    return ClientDatasets(start.task).of(
        identity.rule, data=identity.data, part=identity.part, num_parts=identity.num_parts
    )


def adapt_model(
    start: StartModel,
    examples: Examples,
    chosen: FineTuning,
    *,
    name: str,
    out: Path | None,
    should_stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[TrainingState], None] = lambda _: None,
) -> Adapted:
    """Fine-tune the model in place, and write the better one to the folder ``out``, if given.

    The common model is kept where the fine-tuned one has no lower mean loss on the held-out
    examples. ``start.module`` is then as it was.

    Raises:
        TooFewExamples, SettingsError, MissingColumn: see ``split_data``, ``prepare_folder`` and
            ``fine_tune``.
        OutOfMemory, TaskFailed, TaskError, StateError: see ``fine_tune`` and ``save_model``.
    """
    chosen.check()
    task, model = start.task, start.module
    parameters = chosen_parameters(model, chosen.only)
    data = split_data(task, examples, start.record, name=name, seed=chosen.seed)
    if out is not None:
        prepare_folder(out, start.file)
    whole = SubsetView(examples, np.arange(len(examples)))
    with running("the test of the common model"):
        faults = evaluate_sums(task, model, whole, chosen.batch_size).faults
    data = data.without({*faults})
    data.check(name)
    common = tested_sums(task, model, examples, data.held_out)
    before = {key: one.detach().clone() for key, one in parameters.items()}
    training = fine_tune(
        task, model, examples, data, chosen, should_stop=should_stop, on_step=on_step
    )
    found = compare(task, common, tested_sums(task, model, examples, data.held_out))
    is_adapted = found.difference > 0
    if not is_adapted:
        put(parameters, before)
    adapted = Adapted(
        name=name,
        model=model,
        is_adapted=is_adapted,
        found=found,
        is_held_out_by_run=data.is_of_run,
        num_trained=len(data.train),
        num_unusable=len(faults),
        why_unusable=short_summary(faults, examples),
        training=training,
        file=None if out is None else out / "model.safetensors",
    )
    if out is not None:
        save_model(out, start, model, adapted.to_json())
    return adapted
