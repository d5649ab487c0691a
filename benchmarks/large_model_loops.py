"""The loops that a device is compared with on the decoder of ``benchmarks.large_models``.

``python -m benchmarks.large_model_loops KIND K`` trains on K micro-batches of one example, and
prints the seconds of each as JSON lines. ``bare`` is ``loss.backward()`` alone, ``adamw`` the same
with torch's AdamW and one step at the end, ``trainer`` Hugging Face's Trainer (transformers and
accelerate), ``fabric`` Lightning Fabric; both accumulate K micro-batches with AdamW.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module, util
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.tasks import Decoder, Language
from headwater.common.model.chunked_cross_entropy import adding_in_place

NEEDS = {
    "bare": (),
    "adamw": (),
    "trainer": ("transformers", "accelerate"),
    "fabric": ("lightning_fabric",),
}


def missing(kind: str) -> list[str]:
    """Return the packages that a loop needs and that are not installed."""
    return [name for name in NEEDS[kind] if util.find_spec(name) is None]


class _Loss(nn.Module):
    """The decoder with its loss as the output, as Hugging Face's Trainer wants it."""

    def __init__(self, task: Language) -> None:
        super().__init__()
        self.task, self.decoder = task, task.new_model()

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        assert isinstance(self.decoder, Decoder)
        return {"loss": self.task.loss_sum(self.decoder, (tokens,))[0]}


def _examples(task: Language) -> Tensor:
    return task.train_examples(data=None, part=0, num_parts=1).tensors[0]


def _bare(num_steps: int, note: Callable[[], None], *, with_step: bool) -> None:
    task = Language()
    model, tokens = _Loss(task), _examples(task)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4) if with_step else None
    for step in range(num_steps):
        loss = model(tokens[step : step + 1])["loss"]
        with adding_in_place():
            loss.backward()
        if optimizer is not None and step == num_steps - 1:
            optimizer.step()
        note()


def _fabric(num_steps: int, note: Callable[[], None]) -> None:
    task = Language()
    tokens = _examples(task)
    # No import statement: the type checker need not have the package.
    fabric: Any = import_module("lightning_fabric").Fabric(accelerator="cpu", devices=1)
    plain = _Loss(task)
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-4))
    for step in range(num_steps):
        with fabric.no_backward_sync(model, enabled=step < num_steps - 1):
            fabric.backward(model(tokens[step : step + 1])["loss"])
        if step == num_steps - 1:
            optimizer.step()
        note()


def _trainer(num_steps: int, note: Callable[[], None]) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_substep_end(self, *_: Any, **__: Any) -> None:
            note()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            note()

    task = Language()
    rows = [{"tokens": row} for row in _examples(task)[:num_steps]]
    with tempfile.TemporaryDirectory(prefix="headwater-benchmark-") as folder:
        chosen = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=num_steps,
            max_steps=1,
            optim="adamw_torch",
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        Trainer(model=_Loss(task), args=chosen, train_dataset=rows, callbacks=[Noting()]).train()


def main() -> None:
    """Train as the first argument says, on as many micro-batches as the second says."""
    kind, num_steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    last = time.perf_counter()

    def note() -> None:
        nonlocal last
        now = time.perf_counter()
        print(json.dumps(now - last), flush=True)
        last = now

    loops: dict[str, Callable[[], None]] = {
        "bare": lambda: _bare(num_steps, note, with_step=False),
        "adamw": lambda: _bare(num_steps, note, with_step=True),
        "trainer": lambda: _trainer(num_steps, note),
        "fabric": lambda: _fabric(num_steps, note),
    }
    loops[kind]()


if __name__ == "__main__":
    main()
