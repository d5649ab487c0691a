"""Accuracy against epsilon: noise of the server, of the devices under masks, and of Apple's pfl.

Digits over simulated devices, each a device's whole part (device-level privacy); the fleets, models
and settings are in ``benchmarks.private_work``, the ways in ``benchmarks.private_ways`` and
``benchmarks.private_pfl``. All ways take the same rounds over the same images, and have the same
clip norm, delta and server optimizer.

* ``central``: plain rounds of the whole system, the server adds the noise.
* ``bare``: the same in a few lines of PyTorch, with ``torch.normal``, as Opacus does it with
  examples in the place of devices (DP-FedSGD).
* ``pfl``: Apple's simulator with the same noise. It is left out if it is not installed (the extra
  ``simulators``).
* ``same_noise``: the devices add their shares in the ring, and the opened sum has the noise of
  ``central``. ``off_twin`` is the difference to a run with the very same draws in float64, which is
  what the ring's rounding costs.
* ``same_epsilon``: the devices add shares for the same epsilon under the defaults' worst case, of
  0.7 survivors of which 0.1 of the members collude; all devices survive.
* ``masked``: ``same_epsilon`` by the whole system with its masks (100 devices, epsilon 4).

Each figure is the test accuracy after the last round: mean, spread (one standard deviation) and
number of seeds. ``seconds_ratio`` is the median of the ratios of masked rounds with and without
noise, by turns. All runs take 40 minutes of a core. ``--lines FILE`` appends each run's result to a
file as it comes, and does not repeat those that the file has; ``--part`` runs one part (``table``:
none, it reports what the file has); ``--picture FILE`` draws the results.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import headwater
from benchmarks.measure import Figures, arguments, report
from benchmarks.private_pfl import pfl
from benchmarks.private_picture import draw
from benchmarks.private_results import Line, Results
from benchmarks.private_ways import Work, bare, shares, simulated
from benchmarks.private_work import CHOSEN, EPSILONS, SEED_OF_CHOICE, TASKS, candidates, chosen_for

SEEDS = {100: 5, 1000: 3}
FEWER = {("pfl", 1000): 2, ("masked", 100): 3}
"""A pfl run of 1,000 devices and a masked run of 100 take up to a minute each."""
WAYS = ("bare", "same_noise", "same_epsilon", "central", "pfl", "masked")
WAYS_WITHOUT_NOISE = ("bare", "central", "pfl")
EPSILON_OF_MASKED = 4.0
TURNS, ROUNDS_IN_TURN = 3, 4
FLEETS = {f"{model}-{number}": (model, number) for model, number in CHOSEN}
PARTS = ("choose", *FLEETS, "time", "table")


def cases(model: str, devices: int) -> Iterator[Line]:
    """Yield the runs of a model on a fleet, seed by seed."""
    for seed in range(SEEDS[devices]):
        for way in WAYS:
            if seed >= FEWER.get((way, devices), SEEDS[devices]) or not _can_run(way, devices):
                continue
            epsilons = (EPSILON_OF_MASKED,) if way == "masked" else EPSILONS
            for epsilon in (None, *epsilons) if way in WAYS_WITHOUT_NOISE else epsilons:
                yield Line(way=way, model=model, devices=devices, epsilon=epsilon, seed=seed)


def _can_run(way: str, devices: int) -> bool:
    if way == "pfl":
        return importlib.util.find_spec("pfl") is not None
    return way != "masked" or devices == 100


def run(line: Line, results: Results, *, rounds: int | None = None) -> None:
    """Do a line's run and add its result, and with shares of noise also that of its twin."""
    choice = chosen_for(line.model, line.devices, epsilon=line.epsilon)
    if rounds is not None:
        choice = replace(choice, rounds=rounds)
    work = Work(model=line.model, num_devices=line.devices, choice=choice)
    way, epsilon, seed = line.way, line.epsilon, line.seed
    if way in ("same_noise", "same_epsilon"):
        assert epsilon is not None
        found, twin = shares(work, epsilon, seed=seed, is_same_noise=way == "same_noise")
        results.add(replace(line, way=f"{way}_twin", accuracy=twin.accuracy))
    elif way == "pfl":
        found = pfl(work, epsilon, seed=seed)
    elif way == "bare":
        found = bare(work, epsilon, seed=seed)
    else:
        found = simulated(work, epsilon, seed=seed, is_masked=way == "masked")
    results.add(replace(line, accuracy=found.accuracy, spent=found.epsilon))


def choose(model: str, devices: int) -> Figures:
    """Return the accuracy of each candidate at epsilon 4, best first."""
    found = []
    for choice in candidates():
        work = Work(model=model, num_devices=devices, choice=choice)
        found.append((bare(work, 4.0, seed=SEED_OF_CHOICE).accuracy, str(choice)))
    return {text: accuracy for accuracy, text in sorted(found, reverse=True)}


def seconds_ratio(devices: int, turns: int) -> float:
    """Return the time of masked rounds with noise over those without."""
    ratios = []
    for turn in range(turns):
        seconds = {}
        for epsilon in (None, 8.0) if turn % 2 else (8.0, None):
            done = headwater.simulate(
                TASKS["perceptron"](16),
                clients=devices,
                rounds=ROUNDS_IN_TURN,
                threads=1,
                accumulation_steps=2,
                micro_batch_size=8,
                secure_aggregation="semi-honest",
                settings={"privacy.epsilon": epsilon, "check_task": False},
            )
            seconds[epsilon] = statistics.median(row.seconds for row in done.history)
        ratios.append(seconds[8.0] / seconds[None])
    return statistics.median(ratios)


def main() -> None:
    """Run the parts, report and draw."""
    given = arguments(__doc__, part=PARTS, lines=(), picture=())
    start = time.perf_counter()
    results = Results(None if given.lines is None else Path(given.lines))
    figures: Figures = {}
    parts = PARTS if given.part is None else (given.part,)
    if given.quick:
        parts = ()
        run_quickly(results)
        figures["seconds_ratio"] = seconds_ratio(10, 1)
    for part in parts:
        if part == "choose":
            figures[part] = {name: choose(*fleet) for name, fleet in FLEETS.items()}
        elif part == "time":
            figures["seconds_ratio"] = seconds_ratio(100, TURNS)
        elif part in FLEETS:
            for line in cases(*FLEETS[part]):
                if line.case not in results:
                    run(line, results)
    figures |= results.figures()
    if given.picture is not None:
        draw(results.figures(), given.picture)
    figures["minutes"] = (time.perf_counter() - start) / 60
    report(figures, as_json=given.json, doc=__doc__)


def run_quickly(results: Results) -> None:
    """Run two rounds of ten devices in each way but the masks'."""
    for way in WAYS:
        if _can_run(way, 10):
            line = Line(way=way, model="convolutions", devices=10, epsilon=8.0, seed=0)
            run(line, results, rounds=2)


if __name__ == "__main__":
    main()
