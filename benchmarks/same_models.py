"""Checks that a refactoring changes no bit of any model: a fixed list of runs and their digests.

Run it before a change with ``--write FILE`` and after it with ``--against FILE``, on one machine
with one version of torch: other CPUs and builds round differently. Each run is one of the commands
that users start, and its digest is the SHA-256 of the parameters and buffers that it saves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
DIGITS = "--task examples/digits.py:Digits --threads 1 --seed 3 --optimizer adam"
ADAM = f"{DIGITS} --learning-rate 0.01 --micro-batch-size 4"
PRIVATE = "--accumulation-steps 2 --privacy-noise-multiplier 1 --privacy-clip 0.1"
SIMULATED = {
    "one by one": f"{ADAM} --clients 12 --rounds 6 --compute one-by-one",
    "one by one, set K": f"{ADAM} --clients 6 --rounds 4 --accumulation-steps 3",
    "one by one, workers": f"{ADAM} --clients 8 --rounds 3 --compute one-by-one --workers 2",
    "fused": f"{ADAM} --clients 100 --rounds 5 --compute fused",
    "fused, dirichlet, cohort": f"{ADAM} --clients 200 --cohort-size 60 --rounds 5 "
    "--partition dirichlet:0.3 --compute fused --deadline 4 --weighting dataset",
    "fused, set K": f"{ADAM} --clients 80 --rounds 4 --accumulation-steps 2 --compute fused",
    "vectorised": f"{ADAM} --clients 100 --rounds 5 --compute vectorised",
    "vectorised, noise scale": f"{ADAM} --clients 60 --rounds 5 --follow-noise-scale",
    "fused, dropout": f"{ADAM} --clients 60 --rounds 5 --dropout 0.2",
    "fleet file": f"{ADAM} --fleet examples/fleets/village.toml --rounds 6",
    "local steps": f"{DIGITS} --clients 6 --rounds 3 --accumulation-steps 2 --micro-batch-size 8 "
    "--local-steps 4 --learning-rate 0.1",
    "bfloat16": f"{ADAM} --clients 5 --rounds 3 --precision bfloat16",
    "schedule": f"{ADAM} --clients 40 --rounds 5 --schedule CosineAnnealingLR "
    "--schedule-argument T_max=5 --warmup-rounds 2 --batch-scaling sqrt",
    "semi-honest": f"{ADAM} --clients 8 --rounds 3 --secure-aggregation semi-honest",
    "semi-honest, dropout": f"{ADAM} --clients 12 --rounds 4 --secure-aggregation semi-honest "
    "--dropout 0.1",
    "semi-honest, sparse": f"{ADAM} --clients 70 --rounds 1 --secure-aggregation semi-honest",
    "active": f"{ADAM} --clients 6 --rounds 2 --secure-aggregation active",
    "transformer": "--task examples/text_transformer.py:TextTransformer --threads 1 --clients 3 "
    "--rounds 2 "
    "--accumulation-steps 2 --micro-batch-size 2 --optimizer adamw --learning-rate 0.003",
    "synthetic": "--task examples/synthetic.py:Synthetic --optimizer sgd --threads 1 "
    "--clients 40 --rounds 3",
    "int8": f"{ADAM} --clients 6 --rounds 4 --accumulation-steps 2 --compress int8",
    "int4 up, int2 down": f"{ADAM} --clients 6 --rounds 4 --accumulation-steps 2 --compress int4 "
    "--compress-down int2",
    "top-k, int8 down": f"{ADAM} --clients 6 --rounds 4 --accumulation-steps 2 --compress top-k "
    "--compress-fraction 0.05 --compress-down int8",
    "random-k, semi-honest": f"{ADAM} --clients 6 --rounds 3 --accumulation-steps 2 "
    "--compress random-k --compress-fraction 0.1 --secure-aggregation semi-honest",
    "low rank, semi-honest": f"{ADAM} --clients 6 --rounds 4 --accumulation-steps 2 "
    "--compress low-rank --compress-rank 8 --secure-aggregation semi-honest",
    "trimmed mean": f"{ADAM} --clients 10 --rounds 4 --accumulation-steps 2 "
    "--aggregation trimmed-mean --attackers 0.2",
    "krum": f"{ADAM} --clients 10 --rounds 4 --accumulation-steps 2 --aggregation krum "
    "--attackers 0.2",
    "asynchronous": f"{ADAM} --clients 10 --rounds 6 --accumulation-steps 2 --asynchronous "
    "--buffer 4",
    "asynchronous, semi-honest": f"{ADAM} --clients 10 --rounds 5 --accumulation-steps 2 "
    "--asynchronous --buffer 5 --secure-aggregation semi-honest",
    "tree": f"{ADAM} --clients 9 --rounds 4 --accumulation-steps 2 --aggregators 3",
    "own parameters": f"{ADAM} --clients 6 --rounds 4 --accumulation-steps 2 "
    "--local-parameters 2.*",
    "own parameters, local steps": f"{DIGITS} --clients 6 --rounds 3 --accumulation-steps 2 "
    "--micro-batch-size 8 --local-steps 3 --learning-rate 0.1 --local-parameters 2.*",
    "frozen part": "--task tests/adapted.py:Adapted --threads 1 --clients 3 --rounds 3 "
    "--accumulation-steps 2 --micro-batch-size 4 --optimizer adam --learning-rate 0.01",
    "FedProx": f"{DIGITS} --clients 6 --rounds 3 --algorithm fedprox --local-epochs 1 "
    "--local-batch-size 16 --learning-rate 0.1 --proximal 0.1",
    "SCAFFOLD": f"{DIGITS} --clients 6 --cohort-size 4 --rounds 4 --algorithm scaffold "
    "--local-steps 3 --accumulation-steps 2 --micro-batch-size 8",
    "client momentum": f"{DIGITS} --clients 6 --cohort-size 4 --rounds 4 "
    "--algorithm client-momentum --local-steps 3 --accumulation-steps 2 --micro-batch-size 8",
    "held out on devices": f"{ADAM} --clients 6 --rounds 4 --evaluate-on-devices",
    "engine grpc": f"{ADAM} --clients 3 --rounds 3 --engine grpc",
    "engine flower-ray": f"{ADAM} --clients 4 --rounds 2 --engine flower-ray "
    "--accumulation-steps 2",
}

PRIVATES = {
    "private": f"{ADAM} --clients 6 --rounds 3 {PRIVATE}",
    "private, semi-honest": f"{ADAM} --clients 6 --rounds 3 {PRIVATE} "
    "--secure-aggregation semi-honest",
    "private by example": f"{ADAM} --clients 6 --rounds 3 {PRIVATE} --privacy-unit example",
}
# The system's random numbers, which noise is drawn from, in a known order.
KNOWN_NUMBERS = (
    "import os, random, sys; os.urandom = random.Random(3).randbytes; "
    "from headwater.simulation.cli import main; main()"
)
# A device that masks orders its examples by a secret of its own: no two such runs are the same.
NETWORKS = {
    "network": "",
    "network, int8 both ways": "--compress int8 --compress-down int8",
}


def main() -> None:
    """Run all, then write or compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="where to write the digests")
    parser.add_argument("--against", type=Path, help="digests to compare with")
    parser.add_argument("--only", help="runs whose name holds this")
    given = parser.parse_args()
    expected = {} if given.against is None else json.loads(given.against.read_text())
    found: dict[str, str] = {}
    changed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in [*SIMULATED, *PRIVATES, *NETWORKS, *OTHERS]:
            if given.only is not None and given.only not in name:
                continue
            began = time.perf_counter()
            found[name] = _digest(_run(name, Path(folder) / name.replace(" ", "-")))
            verdict = ""
            if expected:
                is_same = expected[name] == found[name]
                verdict = "same" if is_same else "CHANGED"
                changed += [] if is_same else [name]
            seconds = time.perf_counter() - began
            print(f"{name:<28}{found[name][:16]}  {seconds:5.1f} s  {verdict}", flush=True)
    if given.write is not None:
        given.write.write_text(json.dumps(found, indent=1) + "\n")
    if changed:
        sys.exit(f"changed: {', '.join(changed)}")


def _run(name: str, out: Path) -> Path:
    if name in OTHERS:
        return OTHERS[name](out)
    if name in PRIVATES:
        _run_to_end([sys.executable, "-c", KNOWN_NUMBERS, *PRIVATES[name].split(), "--out", out])
        return out
    if name in NETWORKS:
        return _network(out, NETWORKS[name])
    _simulate(SIMULATED[name], out)
    return out


def _resumed(out: Path) -> Path:
    _simulate(f"{ADAM} --clients 50 --rounds 2 --partition labels:2", out)
    _command("headwater-simulate", ["--resume", "--rounds", "5", "--out", str(out)])
    return out


def _simulate(flags: str, out: Path) -> None:
    _command("headwater-simulate", [*flags.split(), "--out", str(out)])


class Network:
    """A server and its clients on loopback, each in its own process."""

    def __init__(self, folder: Path, task: str = "--task examples/digits.py:Digits") -> None:
        folder.mkdir(parents=True)
        self._folder, self._task = folder, task
        self._clients: list[subprocess.Popen[bytes]] = []

    def serve(self, flags: str) -> subprocess.Popen[bytes]:
        return self._start("headwater-server", f"{self._task} {flags}")

    def _start(self, name: str, flags: str) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            command: list[str | Path] = [BIN / name, *flags.split()]
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)

    def connect(self, address: str, flags: Sequence[str]) -> None:
        for part, own in enumerate(flags):
            where = f"--server {address} --name {part} --state {self._folder}/state-{part}"
            more = f"{self._task} --threads 1 --patience 300 --once {own}"
            self._clients.append(self._start("headwater-client", f"{where} {more}"))

    def end(self, *servers: subprocess.Popen[bytes]) -> None:
        """Wait until all have ended well."""
        for process in (*servers, *self._clients):
            if process.wait(300) != 0:
                log = (self._folder / "log").read_text()
                sys.exit(f"{process.args!r} ended with {process.returncode}\n{log[-4000:]}")
        self._clients = []


PARTS = [f"--part {part} --num-parts 3" for part in range(3)]


def _network(out: Path, more: str) -> Path:
    network, address = Network(out.with_name(f"{out.name}-network")), _free_address()
    flags = f"{ADAM} --accumulation-steps 3 --rounds 4 --min-clients 3 --listen {address}"
    server = network.serve(f"{flags} {more} --out {out}")
    network.connect(address, PARTS)
    network.end(server)
    return out


def _growing(out: Path) -> Path:
    """Append rows to one device's file between two runs of its client."""
    folder = out.with_name("growing-devices")
    _run_to_end([sys.executable, "-m", "headwater.examples.tabular_csv", folder])
    files = sorted(folder.iterdir())[:2]
    lines = files[0].read_text().splitlines(keepends=True)
    files[0].write_text("".join(lines[:40]))
    task = "--task examples/tabular_csv.py:TabularCsv"
    network, address = Network(out.with_name("growing-network"), task), _free_address()
    flags = f"--optimizer adam --learning-rate 0.01 --threads 1 --listen {address} --min-clients 2"
    plan = "--accumulation-steps 3 --micro-batch-size 4"
    for more in (f"--rounds 4 {plan}", "--rounds 14 --resume"):
        server = network.serve(f"{flags} {more} --out {out}")
        network.connect(address, [f"--data {file}" for file in files])
        network.end(server)
        files[0].write_text("".join(lines))
    return out


def _taken_over(out: Path) -> Path:
    """Kill the server in mid-run; its standby goes on."""
    network = Network(out.with_name("standby-network"))
    addresses = [_free_address(), _free_address()]
    shared = out.with_name("standby-shared")
    flags = f"{ADAM} --accumulation-steps 3 --rounds 40 --min-clients 3 --shared-state {shared} "
    flags += "--term-seconds 2"
    first = network.serve(f"{flags} --listen {addresses[0]} --out {out}-first")
    network.connect(",".join(addresses), PARTS)
    rows = Path(f"{out}-first") / "rounds.jsonl"
    while not rows.exists() or len(rows.read_text().splitlines()) < 3:
        time.sleep(0.01)
    standby = network.serve(f"{flags} --listen {addresses[1]} --out {out} --standby")
    first.kill()
    first.wait()
    network.end(standby)
    return out


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def _command(name: str, flags: Sequence[str]) -> None:
    _run_to_end([BIN / name, *flags])


def _run_to_end(command: Sequence[str | Path]) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def _digest(out: Path) -> str:
    """Hash names and values of the saved model, and none of the file's metadata."""
    digest = hashlib.sha256()
    with safe_open(out / "model.safetensors", "pt") as saved:
        for name in sorted(saved.keys()):
            digest.update(name.encode())
            digest.update(saved.get_tensor(name).reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


OTHERS = {"resumed": _resumed, "growing data": _growing, "taken over": _taken_over}


if __name__ == "__main__":
    main()
