"""A test on the devices over real processes: the command takes its run's settings, and prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import headwater
from headwater.server.evaluation.result_table import read_result
from tests.evaluation.evaluated import THREE, Three, assert_is_central, held_out
from tests.processes import Processes, free_port

pytestmark = pytest.mark.slow

CLIENTS, FRACTION = 3, 0.4
PLAN = ("--accumulation-steps", 1, "--micro-batch-size", 16, "--min-clients", CLIENTS)


def is_state(path: Path) -> bool:
    """Whether a file is a device's state file, NAME-RUN.json."""
    return re.fullmatch(r"\d+-\d+\.json", path.name) is not None


def test_the_command_tests_a_run_s_model_plain_compared_and_masked(tmp_path: Path) -> None:
    out, port = tmp_path / "run", free_port()
    with Processes(tmp_path) as processes:
        server = processes.start(
            *("server", "--task", THREE, "--listen", f"127.0.0.1:{port}", "--out", out, *PLAN),
            *("--rounds", 2, "--evaluate-on-devices"),
            *("--set", f"evaluation.held_out_fraction={FRACTION}"),
        )
        for part in range(CLIENTS):
            which = ("--num-parts", CLIENTS, "--name", str(part), "--stay")
            processes.client(port, part, *which, task=THREE)
        server.succeed()
        states = {path: path.read_text() for path in tmp_path.rglob("*.json") if is_state(path)}
        assert len(states) == CLIENTS
        model = headwater.load_model(out, Three())
        examples = held_out(range(CLIENTS), fraction=FRACTION)
        ways = ((), ("--compare-with", out), ("--secure-aggregation", "semi-honest"))
        for number, flags in enumerate(ways):
            test = processes.run("server", "evaluate", "--out", out, "--on-devices", *flags)
            test.succeed()
            found = read_result(out)
            assert_is_central(found, model, examples)
            assert found["is_masked"] == (number == 2)
            assert re.search(rf"tested on {len(examples[1])} examples of 3 devices", test.text())
            assert f"written to {out / 'evaluation.json'}" in test.text()
    assert {path: path.read_text() for path in states} == states  # the places in the data
    page = (out / "report.html").read_text()
    assert "under masks" in page
    folders = sorted(path.name for path in (out / "evaluations").iterdir())
    assert folders == ["test", "test-2", "test-3"]
    assert not [*out.glob("evaluations/*/*.safetensors")]
    assert json.loads((out / "evaluations" / "test-2" / "evaluation.json").read_text())["devices"]


def test_a_run_that_held_out_nothing_needs_a_share(tmp_path: Path) -> None:
    headwater.simulate(
        THREE, clients=CLIENTS, rounds=1, out=tmp_path, progress=False, accumulation_steps=1
    )
    with Processes(tmp_path) as processes:
        test = processes.run("server", "evaluate", "--out", tmp_path, "--on-devices")
        assert test.wait() != 0
        assert "the devices of the run held out no examples" in test.text()
        flags = ("--min-clients", 2)
        test = processes.run("server", "evaluate", "--out", tmp_path, *flags)
        assert "add --on-devices" in test.text()
