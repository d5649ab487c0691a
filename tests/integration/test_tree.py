"""A server, two aggregators and their devices, in processes of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certificates import files, make_folder
from tests.processes import Process, Processes, free_port, model_digest, port_of, rows, write_task

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NUM_DEVICES = 4
SETTINGS = ("--rounds", 3, "--accumulation-steps", 3, "--micro-batch-size", 8)
ADAM = ("--optimizer", "adam", "--learning-rate", 0.01, "--evaluate-on-devices")


def above_file(folder: Path, name: str, certificates: Path | None) -> Path:
    """Write what ``headwater-client join`` leaves: a name, and a certificate for the server."""
    path = folder / f"{name}.toml"
    text = f'[client]\nname = "{name}"\nstate = "{folder / "above"}"\n'
    if certificates is not None:
        flags = [str(flag) for flag in files(certificates, name)]
        named = dict(zip(flags[::2], flags[1::2], strict=True))
        lines = [f'{flag.removeprefix("--tls-")} = "{path}"' for flag, path in named.items()]
        text += "[tls]\n" + "\n".join(lines) + "\n"
    path.write_text(text)
    return path


def test_a_tree_makes_the_simulators_model_byte_for_byte_with_tls_on_each_level(
    tmp_path: Path,
) -> None:
    task = write_task(tmp_path).spec
    names = [str(part) for part in range(NUM_DEVICES)]
    above, below = tmp_path / "certificates-above", tmp_path / "certificates-below"
    make_folder(above, "north", "south")
    make_folder(below, *names)
    with Processes(tmp_path) as processes:
        needed = ("--min-clients", NUM_DEVICES, *files(above, "server"))
        trusted = ("--trusted-aggregators", "north,south")
        root = processes.server(*SETTINGS, *ADAM, *needed, *trusted, task=task)
        upstream = f"127.0.0.1:{port_of(root)}"
        others: list[Process] = []
        for name, devices in (("north", names[:2]), ("south", names[2:])):
            port = free_port()
            own = ("--listen", f"127.0.0.1:{port}", *files(below, "server"), "--task", task)
            up = ("--upstream", upstream, "--upstream-config", above_file(tmp_path, name, above))
            others.append(processes.start("server", *own, *up, "--threads", 1))
            for device in devices:
                parts = ("--num-parts", NUM_DEVICES, *files(below, device))
                others.append(processes.client(port, int(device), *parts, task=task))
        for process in (root, *others):
            process.succeed()
        flat = tmp_path / "flat"
        more = ("--clients", NUM_DEVICES, "--threads", 1, "--out", flat, "--task", task)
        processes.run("simulation", *SETTINGS, *ADAM, *more).succeed()
    assert model_digest(tmp_path / "out") == model_digest(flat)
    told = ("loss", "weight", "metrics")
    assert [[row[key] for key in told] for row in rows(tmp_path / "out")] == [
        [row[key] for key in told] for row in rows(flat)
    ]


def test_a_feature_s_sums_pass_through_an_aggregator_with_the_simulators_bits(
    tmp_path: Path,
) -> None:
    """Two devices are the aggregator's, the third is the server's own.

    The plan of one has a tensor of 448 kB, 597 kB in base64: those of two fit in a message, of
    1 MiB, if they have it once.
    """
    task = write_task(tmp_path, hidden=16_000).spec
    feature = ("--feature", f"{ROOT / 'examples' / 'extensions' / 'scaffold.py'}:Scaffold")
    local = ("--local-steps", 2, "--optimizer", "sgd", "--learning-rate", 1, *SETTINGS, *feature)
    with Processes(tmp_path) as processes:
        needed = ("--min-clients", 3, "--trusted-aggregators", "north")
        root = processes.server(*local, *needed, task=task)
        above, below = port_of(root), free_port()
        up = ("--upstream", f"127.0.0.1:{above}")
        named = ("--upstream-config", above_file(tmp_path, "north", None))
        own = ("--listen", f"127.0.0.1:{below}", "--task", task, "--threads", 1, *feature)
        others = [processes.start("server", *own, *up, *named)]
        for part, port in enumerate((below, below, above)):
            others.append(processes.client(port, part, "--num-parts", 3, *feature, task=task))
        for process in (root, *others):
            process.succeed()
        flat = tmp_path / "flat"
        more = ("--clients", 3, "--threads", 1, "--out", flat, "--task", task)
        processes.run("simulation", *local, *more).succeed()
    assert model_digest(tmp_path / "out") == model_digest(flat)
