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

from safetensors import safe_open

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
DIGITS = "--task examples/digits.py:Digits --threads 1 --seed 3 --optimizer adam"
ADAM = f"{DIGITS} --learning-rate 0.01 --micro-batch-size 4"
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
    "engine grpc": f"{ADAM} --clients 3 --rounds 3 --engine grpc",
    "engine flower-ray": f"{ADAM} --clients 4 --rounds 2 --engine flower-ray "
    "--accumulation-steps 2",
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
        for name in [*SIMULATED, "resumed", "network"]:
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
    if name == "network":
        return _network(out)
    if name == "resumed":
        _simulate(f"{ADAM} --clients 50 --rounds 2 --partition labels:2", out)
        _command("headwater-simulate", ["--resume", "--rounds", "5", "--out", str(out)])
        return out
    _simulate(SIMULATED[name], out)
    return out


def _simulate(flags: str, out: Path) -> None:
    _command("headwater-simulate", [*flags.split(), "--out", str(out)])


def _network(out: Path) -> Path:
    """Run a server and two clients, each in its own process, over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = f"{ADAM} --accumulation-steps 3 --rounds 4 --min-clients 2 --listen {address}"
    server = subprocess.Popen(
        [BIN / "headwater-server", *flags.split(), "--out", out],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    clients = [
        subprocess.Popen(
            [
                *(BIN / "headwater-client", "--server", address, "--name", str(part)),
                *("--task", "examples/digits.py:Digits", "--threads", "1", "--part", str(part)),
                *("--num-parts", "2", "--state", out.with_name(f"state-{part}")),
            ],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
        )
        for part in range(2)
    ]
    for process in (server, *clients):
        if process.wait(300) != 0:
            sys.exit(f"network: {process.args!r} ended with {process.returncode}")
    return out


def _command(name: str, flags: Sequence[str]) -> None:
    done = subprocess.run([BIN / name, *flags], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} {' '.join(flags)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")


def _digest(out: Path) -> str:
    """Hash names and values of the saved model, and none of the file's metadata."""
    digest = hashlib.sha256()
    with safe_open(out / "model.safetensors", "numpy") as saved:
        for name in sorted(saved.keys()):
            digest.update(name.encode())
            digest.update(saved.get_tensor(name).tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main()
