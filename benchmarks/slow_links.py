"""Wall-clock time to a loss behind home links: few bits beside float32, and Flower's FedAvg.

Four devices train ``benchmarks.bytes_to_loss``'s transformer on unlike texts, each in a network
namespace behind 5 Mbit/s up and 50 down (root, ip and tc). All take the same local steps: AdamW
on 8 examples, H of them a round, its rate falling as a cosine. ``float32`` and the ways in few bits
are Headwater's server and devices over gRPC; ``flower`` is ``flwr.serverapp.strategy.FedAvg`` by
Flower's SuperLink and SuperNodes, whose processes are forked with torch loaded: one for each
message is Flower's way. Few bits get a quarter more local steps, to reach the same loss, and those
of Muon in place of AdamW fewer.

``seconds`` is from the first round's plans until the server's test first shows ``target``, the loss
of ``float32`` at nine tenths of its rounds; ``times`` how many times sooner that is than Flower.
The devices share the machine's cores, so local steps take longer than on cores of their own:
``computed`` is the mean of what a device computed in a round, and ``round`` a round's seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

import psutil

from benchmarks.bytes_to_loss import MUON_RATE, RATE, Texts
from benchmarks.measure import Figures, argument_parser, report
from tests import fork_server
from tests.chaos.machines import Namespace, namespace
from tests.processes import Processes, free_port, rows, until
from tests.venvs import ROOT, make_venv

UP_BITS, DOWN_BITS = 5_000_000, 50_000_000
NUM_DEVICES, BATCH_SIZE, LOCAL_STEPS = 4, 8, 1200
TEST_EVERY = 5  # of the test's examples: its time is no device's
FLOAT32, FLOWER = "float32_h30", "flower_h30"


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """H, how numbers are sent, all local steps as a multiple of float32's, and the optimizer."""

    steps: int = 30
    bits: str | None = None
    times: float = 1.0
    muon: bool = False


WAYS = {
    FLOAT32: Way(),
    FLOWER: Way(),
    "int4_h30": Way(bits="int4", times=1.25),
    "int2_h60": Way(steps=60, bits="int2", times=1.25),
    "int2_h120": Way(steps=120, bits="int2", times=1.25),
    "muon_int4_h30": Way(bits="int4", times=0.5, muon=True),
    "muon_int2_h60": Way(steps=60, bits="int2", times=0.7, muon=True),
}
APP = """
import json, pickle, time
from math import cos, pi
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

from benchmarks.slow_links import BATCH_SIZE, NUM_DEVICES, RATE, HomeTexts

torch.set_num_threads(1)
task = HomeTexts()
client = ClientApp()
server = ServerApp()


@client.train()
def train(message, context):
    model = task.new_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    part, config = int(context.node_config["partition-id"]), message.content["config"]
    examples = pickle.loads(Path(config["texts"]).read_bytes())[part]
    rate = RATE * (1 + cos(pi * (config["server-round"] - 1) / config["rounds"])) / 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    begun = time.monotonic()
    for _ in range(config["steps"]):
        chosen = torch.randint(len(examples), (BATCH_SIZE,)).tolist()
        loss, weight, _ = task.loss_sum(model, task.collate([examples[at] for at in chosen]))
        optimizer.zero_grad()
        (loss / weight).backward()
        optimizer.step()
    metrics = {"num-examples": BATCH_SIZE * config["steps"], "seconds": time.monotonic() - begun}
    content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord(metrics)}
    return Message(RecordDict(content), reply_to=message)


class Told(FedAvg):
    def aggregate_train(self, server_round, replies):
        arrays, metrics = super().aggregate_train(server_round, replies)
        self.seconds = metrics["seconds"]
        return arrays, metrics


@server.main()
def main(grid, context):
    from flwr.app import ConfigRecord

    strategy = Told(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_available_nodes=NUM_DEVICES,
        min_train_nodes=NUM_DEVICES,
    )
    config, model = context.run_config, task.new_model()
    while len(list(grid.get_node_ids())) < NUM_DEVICES:
        time.sleep(0.1)
    begun = time.time()

    def test(number, arrays):
        if not number:
            return
        ended = time.time()
        model.load_state_dict(arrays.to_torch_state_dict())
        with torch.no_grad():
            loss, weight, _ = task.loss_sum(model, task.collate(task.test_examples()))
        row = {
            "seconds": ended - begun,
            "loss": loss.item() / weight,
            "computed": strategy.seconds,
        }
        with Path(config["rows"]).open("a") as file:
            print(json.dumps(row), file=file)

    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=config["rounds"],
        train_config=ConfigRecord({name: config[name] for name in ("steps", "rounds", "texts")}),
        evaluate_fn=test,
    )
"""
PROJECT = """
[project]
name = "homes"
version = "1.0.0"
dependencies = []
[tool.flwr.app]
publisher = "homes"
[tool.flwr.app.components]
serverapp = "homes:server"
clientapp = "homes:client"
[tool.flwr.app.config]
rounds = 80
steps = 30
rows = ""
texts = ""
"""
Row = dict[str, float]


class HomeTexts(Texts):
    """The texts with a shorter test."""

    def test_examples(self) -> list[bytes]:
        return super().test_examples()[::TEST_EVERY]


@contextlib.contextmanager
def homes() -> Iterator[list[Namespace]]:
    """Make the devices' networks."""
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(namespace(UP_BITS, down_bits_per_second=DOWN_BITS, at=number))
            for number in range(NUM_DEVICES)
        ]


def headwater_rows(way: Way, num_rounds: int) -> list[Row]:
    """Run our server and devices."""
    compress = [] if way.bits is None else ["--compress", way.bits, "--compress-down", way.bits]
    inside = ("muon", MUON_RATE) if way.muon else ("adamw", RATE)
    task = "benchmarks.slow_links:HomeTexts"
    with (
        tempfile.TemporaryDirectory() as name,
        homes() as networks,
        Processes(Path(name), PYTHONPATH=str(ROOT)) as processes,
    ):
        port, out = free_port(), Path(name) / "out"
        server = processes.server(
            *("--listen", f"0.0.0.0:{port}", "--plain-text", "--min-clients", NUM_DEVICES),
            *("--rounds", num_rounds, "--algorithm", "fedavgm", "--local-steps", way.steps),
            *("--local-optimizer", inside[0], "--local-learning-rate", inside[1], *compress),
            *("--local-schedule", "CosineAnnealingLR"),
            *("--local-schedule-argument", f"T_max={num_rounds}"),
            *("--optimizer", "sgd", "--learning-rate", 1, "--optimizer-argument", "momentum=0.3"),
            *("--accumulation-steps", 1, "--micro-batch-size", BATCH_SIZE),
            task=task,
        )
        server.wait_for("listening|waiting")
        for number, home in enumerate(networks):
            processes.client(
                *(port, number, "--server", f"{home.outer_address}:{port}", "--plain-text"),
                *("--num-parts", NUM_DEVICES),
                task=task,
                prepare=home.enter,
            )
        server.wait(seconds=3600)
        found = rows(out)
    begun = found[0]["ended_at"] - found[0]["seconds"]
    return [
        {
            "seconds": row["ended_at"] - begun,
            "loss": row["metrics"]["test_loss"],
            "computed": statistics.mean(sum(one["step_seconds"]) for one in row["clients"]),
        }
        for row in found
    ]


class Flower:
    """A SuperLink, and SuperNodes in the devices' networks."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._mark, self._port = folder, uuid4().hex, free_port()
        self._started: list[subprocess.Popen[bytes]] = []
        (folder / "home").mkdir()
        address = f"127.0.0.1:{self._port}"
        (folder / "home" / "config.toml").write_text(
            f'[superlink.homes]\naddress = "{address}"\ninsecure = true\n'
        )

    def __enter__(self) -> Flower:
        return self

    def __exit__(self, *_: object) -> None:
        for process in psutil.process_iter():  # some are in sessions of their own
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                if process.environ().get("MARK") == self._mark:
                    process.send_signal(signal.SIGKILL)
        for started in self._started:
            started.wait()

    def start_link(self) -> None:
        programs = self._programs("link", None)
        self._run(
            programs,
            None,
            "flower-superlink",
            "--insecure",
            "--host",
            "0.0.0.0",
            "--port",
            str(self._port),
        )
        until(self._answers, seconds=120, what=self._said)

    def start_node(self, number: int, home: Namespace) -> None:
        programs = self._programs(f"node-{number}", home)
        self._run(
            programs,
            home,
            *("flower-supernode", "--insecure"),
            *("--superlink", f"{home.outer_address}:{self._port}"),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", f"partition-id={number}"),
        )

    def run(self, steps: int, num_rounds: int) -> list[Row]:
        app = self._folder / "app"
        app.mkdir()
        (app / "pyproject.toml").write_text(PROJECT)
        (app / "homes.py").write_text(APP)
        told = self._folder / "rows.jsonl"
        texts = self._folder / "texts"  # which each message's process would collect anew
        of_parts = [
            HomeTexts().train_examples(data=None, part=part, num_parts=NUM_DEVICES)
            for part in range(NUM_DEVICES)
        ]
        texts.write_bytes(pickle.dumps(of_parts))
        config = f'rounds={num_rounds} steps={steps} rows="{told}" texts="{texts}"'
        run = self._run(
            self._folder / "link" / "bin",
            None,
            *("flwr", "run", str(app), "homes", "--stream", "--run-config", config),
        )
        run.wait(7200)
        lines = told.read_text().splitlines() if told.exists() else []
        assert len(lines) == num_rounds, self._said()
        return [json.loads(line) for line in lines]

    def _programs(self, name: str, home: Namespace | None) -> Path:
        """Make an environment whose often started commands are forked, in a device's network."""
        programs, address = make_venv(self._folder / name), self._folder / f"{name}.forks"
        for command in ("flower-superexec", "flwr-clientapp", "flwr-serverapp"):
            fork_server.make_preloaded(programs / command, address)
        self._run(programs, home, "python", "-P", fork_server.__file__, str(address))
        until(address.exists, seconds=120, what=self._said)
        return programs

    def _run(
        self, programs: Path, home: Namespace | None, *command: str
    ) -> subprocess.Popen[bytes]:
        name = f"{Path(command[0]).name}-{uuid4().hex[:4]}"
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(programs / command[0]), *command[1:]],
                cwd=self._folder,
                env=os.environ
                | {
                    "MARK": self._mark,
                    "PYTHONPATH": str(ROOT),
                    "FLWR_HOME": str(self._folder / "home"),
                    "FLWR_TELEMETRY_ENABLED": "0",
                    "FLWR_DISABLE_UPDATE_CHECK": "1",
                    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
                    "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=None if home is None else home.enter,
            )
        self._started.append(process)
        return process

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def _said(self) -> str:
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in logs)


def flower_rows(steps: int, num_rounds: int) -> list[Row]:
    """Run Flower's."""
    with (
        tempfile.TemporaryDirectory() as name,
        homes() as networks,
        Flower(Path(name)) as flower,
    ):
        flower.start_link()
        for number, home in enumerate(networks):
            flower.start_node(number, home)
        return flower.run(steps, num_rounds)


def until_loss(found: list[Row], target: float) -> float | None:
    """Return the seconds until the test first showed the target."""
    return next((row["seconds"] for row in found if row["loss"] <= target), None)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS, metavar="WAY")
    given = parser.parse_args()
    of_ways: dict[str, list[Row]] = {}
    for name in dict.fromkeys([FLOAT32, *given.ways]):
        way = replace(WAYS[name], steps=2) if given.quick else WAYS[name]
        num_rounds = 2 if given.quick else round(way.times * LOCAL_STEPS) // way.steps
        is_flower = name == FLOWER
        found = flower_rows(way.steps, num_rounds) if is_flower else headwater_rows(way, num_rounds)
        of_ways[name] = found
        print(json.dumps({name: found[-1]}), file=sys.stderr, flush=True)
    baseline = of_ways[FLOAT32]
    target = baseline[len(baseline) * 9 // 10 - 1]["loss"]
    times = {name: until_loss(found, target) for name, found in of_ways.items()}
    figures: Figures = {"target": target}
    for name, found in of_ways.items():
        peer, own = times.get(FLOWER), times[name]
        figures[name] = {
            "seconds": own,
            "times": None if peer is None or own is None else peer / own,
            "loss": found[-1]["loss"],
            "round": found[-1]["seconds"] / len(found),
            "computed": statistics.mean(row["computed"] for row in found),
        }
    report(figures, as_json=given.json, doc=__doc__)


if __name__ == "__main__":
    main()
