"""What following the gradient noise scale gains, and how far the scale that is told is off.

Digits on 20 simulated devices, 150 rounds of Adam at 0.003, three seeds. ``until_90``: rounds and
examples until 90 % of the test images are right, for the followed batch and for two fixed ones.
``told_over_true``: S and |G|^2 as the rounds told them over their truth, which is computed in
float64 from the gradients of all examples, at each round's model and with each device's weight in
that round; both as means over the rounds. ``moving`` is the followed run, ``still`` the same at a
rate so small that the model does not move.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from benchmarks.measure import Figures, argument_parser, markdown, report
from examples.digits import Digits
from headwater.client.app import client_app
from headwater.common.model.parameters import build_model
from headwater.common.settings.schema import Settings
from headwater.server.flower.grid_fleet import GridFleet
from headwater.server.rounds.round_loop import run
from headwater.server.rounds.round_row import RoundRow
from headwater.server.rounds.run_state import Training
from headwater.simulation.engines.message_grid import InProcessGrid
from headwater.simulation.fleet.virtual_hardware import virtual_hardware

NUM_DEVICES, NUM_ROUNDS, NUM_SEEDS = 20, 150, 3
RATE, STILL = 0.003, 1e-30
GOOD = 0.9
WAYS: dict[str, dict[str, Any]] = {
    "followed": {"follow_noise_scale": True},
    "fixed_64": {"effective_batch_size": 64},
    "fixed_512": {"effective_batch_size": 512},
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run's rows, and the parameters that each round's gradients were taken at."""

    rows: list[RoundRow]
    models: list[Tensor]


def trained(plan: dict[str, Any], *, seed: int, rounds: int, rate: float = RATE) -> Run:
    """Simulate one run."""
    settings = Settings.model_validate(
        {
            "task": "examples/digits.py:Digits",
            "seed": seed,
            "rounds": rounds,
            "threads": 1,
            "simulation": {"clients": NUM_DEVICES, "compute": "vectorised"},
            "plan": plan,
            "optimizer": {"name": "adam", "learning_rate": rate},
        }
    )
    grid = InProcessGrid(client_app(virtual_hardware), settings)
    grid.enter_run(1 + seed)
    training = Training(settings, run_id=1 + seed)
    rows: list[RoundRow] = []
    models = [training.image.values_P.clone()]

    def on_round(row: RoundRow) -> None:
        rows.append(row)
        models.append(training.image.values_P.clone())

    run(training, GridFleet(grid), on_round=on_round)
    return Run(rows=rows, models=models)


def until_good(done: Run) -> Figures:
    """Return rounds and examples until the model was good, None if it never was."""
    num_examples = 0
    figures: Figures = {"rounds": None, "examples": None}
    for row in done.rows:
        num_examples += row.num_examples
        if row.metrics["test_accuracy"] >= GOOD:
            figures = {"rounds": row.round, "examples": num_examples}
            break
    figures["accuracy_at_the_end"] = done.rows[-1].metrics["test_accuracy"]
    return figures


class Truth:
    """S and |G|^2 of the fleet's data, from the gradient of every example."""

    def __init__(self) -> None:
        task = Digits()
        self._image = build_model(task, seed=0)
        self._data = [
            task.train_examples(data=None, part=part, num_parts=NUM_DEVICES).tensors
            for part in range(NUM_DEVICES)
        ]
        self._gradients = vmap(grad(self._loss), in_dims=(None, 0, 0))

    def _loss(self, at: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        logits = functional_call(self._image.model, at, (image[None],))
        return functional.cross_entropy(logits, label[None], reduction="sum")

    def at(self, model_P: Tensor, row: RoundRow) -> tuple[float, float]:
        """Return S and |G|^2 at these parameters, by the devices' weights in a round."""
        self._image.values_P.copy_(model_P)
        parameters = {
            name: parameter.detach().double()
            for name, parameter in self._image.model.named_parameters()
        }
        variance, mean_P = 0.0, torch.zeros(len(model_P), dtype=torch.float64)
        for client in row.clients:
            images, labels = self._data[int(client.name)]
            found = self._gradients(parameters, images.double(), labels)
            gradients_NP = torch.cat([value.flatten(1) for value in found.values()], dim=1)
            share = client.weight / row.weight
            mean_P += share * gradients_NP.mean(0)
            if len(labels) > 1:
                apart = float((gradients_NP - gradients_NP.mean(0)).square().sum())
                variance += share * apart / (len(labels) - 1)
        return variance, float(mean_P @ mean_P)


def told_over_true(done: Run, truth: Truth) -> Figures:
    """Compare the means over the rounds of what was told and of the truth."""
    pairs = [
        (row, truth.at(model_P, row))
        for model_P, row in zip(done.models, done.rows, strict=False)
        if row.gradient_variance is not None and row.squared_gradient is not None
    ]
    told_variance = statistics.fmean(row.gradient_variance or 0.0 for row, _ in pairs)
    told_gradient = statistics.fmean(row.squared_gradient or 0.0 for row, _ in pairs)
    return {
        "rounds_told": len(pairs),
        "S": told_variance / statistics.fmean(variance for _, (variance, _) in pairs),
        "squared_gradient": told_gradient / statistics.fmean(squared for _, (_, squared) in pairs),
        "measured_share": statistics.fmean(row.measured_share or 0.0 for row, _ in pairs),
    }


def until_table(figures: Figures) -> str:
    """Return the table of docs/batch.md on the rounds and examples that were needed."""
    rows = []
    for way, plan in WAYS.items():
        found = [seed[way] for seed in figures["until_90"].values()]
        size = plan.get("effective_batch_size")
        flag = "follow-noise-scale" if size is None else f"effective-batch-size {size}"
        columns = (
            ", ".join(str(one["rounds"]) for one in found),
            ", ".join("never" if (n := one["examples"]) is None else f"{n:,}" for one in found),
            ", ".join(f"{one['accuracy_at_the_end']:.1%}" for one in found),
        )
        rows.append((f"`--{flag}`", *columns))
    return markdown(("", "rounds", "examples", f"accuracy after round {NUM_ROUNDS}"), rows)


def told_table(figures: Figures) -> str:
    """Return the table of docs/batch.md on what was recorded, over the truth."""
    told = figures["told_over_true"].values()
    rows = [
        (kind, *(_span([seed[kind][name] for seed in told]) for name in ("squared_gradient", "S")))
        for kind in ("moving", "still")
    ]
    header = ("the model, in runs that follow the noise scale", "\\|G\\|², recorded over true")
    return markdown((*header, "S, recorded over true"), rows)


def _span(found: list[float]) -> str:
    return f"{min(found):.2f} to {max(found):.2f}"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--table", choices=("until", "told"), help="print a table of docs/batch.md")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(1 if flags.quick else NUM_SEEDS)
    rounds = 3 if flags.quick else NUM_ROUNDS
    truth = Truth()
    figures: Figures = {"until_90": {}, "told_over_true": {}}
    for seed in seeds:
        runs = {way: trained(plan, seed=seed, rounds=rounds) for way, plan in WAYS.items()}
        still = trained(WAYS["followed"], seed=seed, rounds=rounds, rate=STILL)
        figures["until_90"][f"seed_{seed}"] = {way: until_good(done) for way, done in runs.items()}
        figures["told_over_true"][f"seed_{seed}"] = {
            "moving": told_over_true(runs["followed"], truth),
            "still": told_over_true(still, truth),
        }
    if flags.table is not None:
        print({"until": until_table, "told": told_table}[flags.table](figures))
        return
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
