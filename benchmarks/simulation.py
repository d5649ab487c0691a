"""Client-rounds per second of simulated rounds, beside Flower's Ray engine, pfl and bare PyTorch.

The work is the same for all (``benchmarks.simulated_work``): a small perceptron on digits, where
calling operators takes the time, a convolutional net and a transformer, where computing does; all
clients in each round. ``rate`` is the clients over the median seconds of a round, once the rounds
run; ``first_seconds`` is from the start of the process to the end of the first round; ``peak_mib``
is VmHWM. Each runs in a process of its own, with one thread of torch; one behind the other, so that
they do not take each other's cores.

* ``one-by-one-in-2``: two worker processes; the simulator's own process is a third. Its share of
  its limit is that of each core: half of what both do. ``of_loops_at_once`` has as its limit two
  processes that run the bare loop at the same time, each over half of the clients: what two cores
  can do at once. It is given by the in-turn case only.
* ``of_limit`` is by the rounds of a way and of its limit by turns in one process, so that load
  takes its share of both: the median of the ratios. ``--case one-by-one-in-turn:digits:200:40``
  tells the least microseconds a client of each part of a round besides.
* ``of_typed`` is the same share for a run as it is typed: with ``+out`` it writes its folder, with
  ``+free`` the planner chooses K (the commands' defaults), and its seconds are all that pass
  between two rounds (``--case fused+out+free-in-turn:digits:1000:11`` for one alone).
* ``+2`` computes in two worker processes, ``+ray`` on a Ray of two cores, in any way:
  ``--case fused+ray:digits:10000:6``.
* ``bare_loop``: client after client, a ``loss.backward()`` for each micro-batch, nothing checked or
  reported. The limit of ``one-by-one``.
* ``bare_fused``: passes over all clients' examples, and nothing else. The limit of ``fused``.
* ``bare_vectors``: ``vmap(grad)``, a vector for each client. The limit of ``vectorised``.
* ``flower_ray``: Flower's simulation with a strategy of Flower's and a client that trains so.
* ``pfl``: Apple's simulator, federated averaging with a local step for each micro-batch.

The last two are left out if they are not installed (the extras ``ray`` and ``simulators``).
``curve`` is the rate of ``fused`` for 100 to 10,000 clients.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn

from benchmarks.measure import Figures, arguments, child, memory_of, report
from benchmarks.simulated_work import WORK, Work, loss_of, resident

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from headwater.server.rounds.round_loop import OnRound
    from headwater.server.rounds.round_row import RoundRow

WAYS = ("fused", "vectorised", "one-by-one")
BARE = ("bare_fused", "bare_vectors", "bare_loop")
PEERS = {"flower_ray": "ray", "pfl": "pfl"}
SIZES = (("digits", 100, 11), ("digits", 1000, 11), ("images", 40, 5), ("text", 8, 4))
WORKERS = 2
SHARED = "one-by-one-in-2"
TYPED = ("fused+out", "fused+free", "fused+out+free")
LIMITS = {**dict(zip(WAYS, BARE, strict=True)), SHARED: "bare_loop"}
IN_TURN = "-in-turn"
ROUNDS_IN_TURN = 4  # times those of a way alone


def ours(
    way: str, work: Work, number: int, rounds: int, *, on_round: OnRound = lambda _: _tick()
) -> None:
    """Run rounds of the whole system."""
    from headwater.common.settings.sources import load
    from headwater.simulation.fleet.fleet_spec import with_fleet
    from headwater.simulation.run import run_engine

    way, *typed = way.split("+")
    chosen = {
        "task": work.spec,
        "rounds": rounds,
        "threads": 1,
        "simulation.clients": number,
        "simulation.compute": "one-by-one" if way == SHARED else way,
        "simulation.workers": WORKERS if way == SHARED or "2" in typed else 1,
        "simulation.engine": "ray" if "ray" in typed else "in-process",
        "plan.accumulation_steps": work.each // work.micro_batch,
        "plan.micro_batch_size": work.micro_batch,
        "optimizer.name": "sgd",
        "optimizer.learning_rate": work.learning_rate,
    }
    if "free" in typed:
        chosen = {key: value for key, value in chosen.items() if not key.startswith("plan.")}
    with tempfile.TemporaryDirectory() as folder:
        if "out" in typed:
            chosen["out"] = f"{folder}/run"
        run_engine(with_fleet(load(None, chosen)), on_round=on_round, resume=False)


ENDS: list[float] = []


def _tick() -> None:
    ENDS.append(time.perf_counter())


def in_turn(way: str, work: Work, number: int, rounds: int) -> Figures:
    """Run rounds of the whole system and of its limit by turns."""
    bare_round = _bare_round(LIMITS[way.partition("+")[0]], work, number)
    loops_at_once = _loops_at_once(work, number) if way == SHARED else None
    own: list[RoundRow] = []
    passed: list[float] = []
    limit: list[float] = []
    at_once: list[float] = []
    ends = [time.perf_counter()]

    def after(row: RoundRow) -> None:
        own.append(row)
        passed.append(time.perf_counter() - ends[-1])
        limit.append(_seconds_of(bare_round))
        if loops_at_once is not None:
            at_once.append(_seconds_of(loops_at_once))
        ends.append(time.perf_counter())

    ours(way, work, number, rounds, on_round=after)
    if "+" in way:
        shares = (b / seconds for seconds, b in zip(passed[2:], limit[2:], strict=True))
        return {"of_limit": statistics.median(shares)}
    own, limit, at_once = own[2:], limit[2:], at_once[2:]  # the first open the data, and warm up
    micro = 1e6 / number
    share = statistics.median(b / row.seconds for row, b in zip(own, limit, strict=True))
    figures: Figures = {
        "of_limit": share / (WORKERS if way == SHARED else 1),
        "least_microseconds": min(row.seconds for row in own) * micro,
        "least_microseconds_of_limit": min(limit) * micro,
    }
    if loops_at_once is not None:
        figures["of_loops_at_once"] = statistics.median(
            b / row.seconds for row, b in zip(own, at_once, strict=True)
        )
        figures["least_microseconds_of_loops_at_once"] = min(at_once) * micro
    parts = own[0].seconds_split
    return figures | {
        f"{part}_microseconds": min(row.seconds_split[part] for row in own) * micro
        for part in parts
    }


def _seconds_of(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _loops_at_once(work: Work, number: int) -> Callable[[], None]:
    """Start processes that each run the bare loop over their share of the clients, when called."""
    context = multiprocessing.get_context("spawn")
    connections = []
    for _ in range(WORKERS):
        ours, theirs = context.Pipe()
        context.Process(
            target=_run_loop, args=(theirs, work, number // WORKERS), daemon=True
        ).start()
        connections.append(ours)

    def all_once() -> None:
        for connection in connections:
            connection.send(None)
        for connection in connections:
            connection.recv()

    return all_once


def _run_loop(connection: Connection, work: Work, number: int) -> None:
    from headwater.common.system.heap import keep_freed_memory

    torch.set_num_threads(1)
    keep_freed_memory()  # as the simulator's processes
    one_round = _bare_round("bare_loop", work, number)
    with contextlib.suppress(EOFError):  # the benchmark has ended
        while True:
            connection.recv()
            one_round()
            connection.send(None)


def bare(kind: str, work: Work, number: int, rounds: int) -> None:
    """Run rounds of what PyTorch alone does."""
    one_round = _bare_round(kind, work, number)
    for _ in range(rounds):
        one_round()
        _tick()


def _bare_round(kind: str, work: Work, number: int) -> Callable[[], None]:
    task = work.task()
    model = task.new_model()
    clients = [
        task.train_examples(data=None, part=part, num_parts=number).tensors
        for part in range(number)
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=work.learning_rate)
    gradients = {
        "bare_fused": _fused,
        "bare_vectors": _vectors,
        "bare_loop": _loop,
    }[kind](model, clients, work)
    weight = sum(labels.numel() for _, labels in clients)

    def one_round() -> None:
        gradients()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad /= weight
        optimizer.step()

    return one_round


def _fused(model: nn.Module, clients: list[Any], work: Work) -> Callable[[], None]:
    images, labels = (torch.cat(column) for column in zip(*clients, strict=True))

    def gradients() -> None:
        model.zero_grad()
        for start in range(0, len(labels), work.examples_at_once):
            end = start + work.examples_at_once
            loss = loss_of(model(images[start:end]), labels[start:end], "sum")
            loss.backward()  # type: ignore[no-untyped-call]

    return gradients


def _loop(model: nn.Module, clients: list[Any], work: Work) -> Callable[[], None]:
    def gradients() -> None:
        sums = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for images, labels in clients:
            model.zero_grad(set_to_none=False)
            for start in range(0, work.each, work.micro_batch):
                end = start + work.micro_batch
                loss = loss_of(model(images[start:end]), labels[start:end], "sum")
                loss.backward()  # type: ignore[no-untyped-call]
            for total, parameter in zip(sums, model.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total

    return gradients


def _vectors(model: nn.Module, clients: list[Any], work: Work) -> Callable[[], None]:
    images, labels = (torch.stack(column) for column in zip(*clients, strict=True))
    trained = dict(model.named_parameters())

    def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        logits = torch.func.functional_call(model, parameters, (inputs,))
        return loss_of(logits, targets, "sum")

    of_each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))

    def gradients() -> None:
        sums = {name: torch.zeros_like(value) for name, value in trained.items()}
        held = {name: value.detach() for name, value in trained.items()}
        for start in range(0, len(labels), work.vectors_at_once):
            end = start + work.vectors_at_once
            for name, rows in of_each(held, images[start:end], labels[start:end]).items():
                sums[name] += rows.sum(0)
        for name, parameter in trained.items():
            parameter.grad = sums[name]

    return gradients


def flower_ray(work: Work, number: int, rounds: int) -> None:
    """Run Flower's own simulation of its FedAvg; its clients take a step a micro-batch."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        task, model = resident(work)
        model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
        part = int(context.node_config["partition-id"])
        images, labels = task.train_examples(data=None, part=part, num_parts=number).tensors
        _local_steps(model, images, labels, work)
        arrays = ArrayRecord(model.state_dict())
        metrics = MetricRecord({"num-examples": work.each})
        content = RecordDict({"arrays": arrays, "metrics": metrics})
        return Message(content, reply_to=message)

    class Timed(FedAvg):
        def aggregate_train(self, *args: Any, **kwargs: Any) -> Any:
            found = super().aggregate_train(*args, **kwargs)
            _tick()
            return found

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = Timed(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=number)
        initial = ArrayRecord(work.task().new_model().state_dict())
        strategy.start(grid=grid, initial_arrays=initial, num_rounds=rounds)

    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, num_supernodes=number, backend_config=resources)


def _local_steps(model: nn.Module, images: Tensor, labels: Tensor, work: Work) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=work.learning_rate)
    for start in range(0, work.each, work.micro_batch):
        end = start + work.micro_batch
        optimizer.zero_grad()
        loss = loss_of(model(images[start:end]), labels[start:end], "mean")
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def pfl(work: Work, number: int, rounds: int) -> None:
    """Run Apple's simulator; users' data are made once, as ours are."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    task = work.task()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.new_model()

        def forward(self, images: Tensor) -> Tensor:
            logits: Tensor = self.net(images)
            return logits

        def loss(self, images: Tensor, labels: Tensor, is_eval: bool = False) -> Tensor:
            return loss_of(self(images), labels, "mean")

        def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
            return {}

    class Clock(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Any]:
            _tick()
            return False, Metrics()

    users = {
        str(part): Dataset(
            raw_data=list(task.train_examples(data=None, part=part, num_parts=number).tensors)
        )
        for part in range(number)
    }
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(users)))
    model = Model()
    central = torch.optim.SGD(model.parameters(), lr=1.0)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds,
            evaluation_frequency=rounds + 1,
            train_cohort_size=number,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=None),
        PyTorchModel(model, torch.optim.SGD, central),
        NNTrainHyperParams(
            local_num_epochs=1,
            local_learning_rate=work.learning_rate,
            local_batch_size=work.micro_batch,
        ),
        NNEvalHyperParams(local_batch_size=work.micro_batch),
        callbacks=[Clock()],
    )


def _run(kind: str, work: Work, number: int, rounds: int) -> Figures:
    torch.set_num_threads(1)
    ENDS.clear()
    if kind.endswith(IN_TURN):
        return in_turn(kind.removesuffix(IN_TURN), work, number, rounds)
    if kind.partition("+")[0] in (*WAYS, SHARED):
        ours(kind, work, number, rounds)
    elif kind in BARE:
        bare(kind, work, number, rounds)
    else:
        {"flower_ray": flower_ray, "pfl": pfl}[kind](work, number, rounds)
    seconds = [after - before for before, after in pairwise(ENDS)]
    return {
        "rate": number / statistics.median(seconds),
        "first_seconds": BEFORE + ENDS[0] - BEGUN,
        "peak_mib": memory_of()["VmHWM"] / 2**20,
    }


BEGUN = time.perf_counter()
BEFORE = time.time() - psutil.Process().create_time()  # of which torch's import takes most
Measure = Callable[[str, str, int, int], Figures]


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _measure(kind: str, work: str, number: int, rounds: int) -> Figures:
    return child("benchmarks.simulation", "--case", f"{kind}:{work}:{number}:{rounds}")


def _here(kind: str, work: str, number: int, rounds: int) -> Figures:
    """Do the same in this process: whether it runs at all, without seven times the imports."""
    return _run(kind, WORK[work], number, rounds)


def _beside(
    work: str,
    number: int,
    rounds: int,
    peers: Iterable[str],
    *,
    in_turn: Iterable[str] = LIMITS,
    measure: Measure = _measure,
) -> Figures:
    """Measure all ways to do a work, and how they stand to each other."""
    found = {kind: measure(kind, work, number, rounds) for kind in (*BARE, *WAYS, SHARED, *peers)}
    found["of_limit"] = {
        way: measure(f"{way}{IN_TURN}", work, number, rounds * ROUNDS_IN_TURN)["of_limit"]
        for way in in_turn
    }
    found["of_typed"] = {
        way: measure(f"{way}{IN_TURN}", work, number, rounds * ROUNDS_IN_TURN)["of_limit"]
        for way in TYPED
    }
    for peer in peers:
        found[f"over_{peer}"] = {way: found[way]["rate"] / found[peer]["rate"] for way in WAYS}
    return found


def main() -> None:
    """Run each in a process of its own and report."""
    chosen = arguments(__doc__, case=())
    if chosen.case is not None:
        kind, work, number, rounds = chosen.case.split(":")
        print(json.dumps(_run(kind, WORK[work], int(number), int(rounds))))
        return
    if chosen.quick:
        # Without the second start of two worker processes, which is most of the time.
        few = _beside("digits", 20, 3, (), in_turn=WAYS, measure=_here)
        figures: Figures = {"digits_20": few}
    else:
        peers = [peer for peer, module in PEERS.items() if _has(module)]
        figures = {
            f"{work}_{number}": _beside(work, number, rounds, peers)
            for work, number, rounds in SIZES
        }
        figures["curve"] = {
            str(number): _measure("fused", "digits", number, 6)["rate"]
            for number in (100, 300, 1000, 3000, 10_000)
        }
    report(figures, as_json=chosen.json, doc=__doc__)


if __name__ == "__main__":
    main()
