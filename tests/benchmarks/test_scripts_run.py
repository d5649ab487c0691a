"""Each benchmark runs in a small form and ends with a line of JSON."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import machines
from tests.processes import Processes

# A figure that each script must have, whatever peers are installed.
KEYS = {
    "accumulation": "mlp",
    "adapters": "device",
    "algorithms": "digits, dirichlet, 5 of 20",
    "banded_noise": "prefix_error_ratio",
    "bfloat16_sums": "K_8",
    "bytes_to_accuracy": "iid_all",
    "bytes_to_loss": "float32_h30",
    "chunked_loss": "chunked",
    "client_memory": "rss_ratio",
    "clipped_examples": "mlp",
    "device_cost": "digits",
    "error_feedback": "iid",
    "exactness": "at_start",
    "fairness": "share_of_examples",
    "federated_text": "masked",
    "foreseen_memory": "cnn_4",
    "fuzz": "executions",
    "hostile_devices": "unasked_heads",
    "large_batch": "tiny.K_2",
    "large_models": "figures",
    "load": "model_is_exact",
    "local_steps": "fedavg_5_epochs",
    "local_training": "epochs_1",
    "masking": "keystream",
    "memory_limits": "cnn",
    "noise_scale": "told_over_true",
    "page_cost": "cpu_ratio",
    "partitions": "iid",
    "planning": "assign",
    "privacy": "seconds_ratio",
    "privacy_audit": "semi-honest, example, z = 1",
    "robust_rules": "honest, iid, sum",
    "round_trip": "clients_1",
    "secure_round": "plain_round_seconds",
    "simulation": "digits_20",
    "soak_months": "problems",
    "server_memory": "P_100000.clients_1.sgd",
    "time_to_accuracy": "digits",
    "wire_bytes": "P_10k",
}
# Those that take four seconds of a core or more even so: `make test-long` runs them.
LONG = {
    "accumulation",
    "adapters",
    "algorithms",
    "bytes_to_accuracy",
    "chunked_loss",
    "client_memory",
    "error_feedback",
    "fairness",
    "federated_text",
    "foreseen_memory",
    "fuzz",
    "hostile_devices",
    "large_models",
    "load",
    "local_steps",
    "local_training",
    "masking",
    "memory_limits",
    "noise_scale",
    "page_cost",
    "privacy_audit",
    "robust_rules",
    "round_trip",
    "server_memory",
    "simulation",
    "soak_months",
    "time_to_accuracy",
    "wire_bytes",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in sorted(KEYS)],
)
def test_script_ends_with_one_line_of_json(name: str, tmp_path: Path) -> None:
    if name == "soak_months" and not (machines.can("cc") and machines.can("history")):
        pytest.skip("this machine has no C compiler, or this checkout no history")
    said = said_by(tmp_path, name, "--quick", "--json")
    figures: dict[str, Any] = json.loads(said.splitlines()[-1])
    assert KEYS[name] in figures
    assert "machine" in figures


@pytest.mark.slow
def test_help_says_what_is_measured(tmp_path: Path) -> None:
    said = said_by(tmp_path, "wire_bytes", "--help")
    assert "Bytes on the wire per update" in said
    assert "--json" in said


def said_by(folder: Path, name: str, *flags: str) -> str:
    """Run a script to its end, which must be a good one; return what it printed."""
    with Processes(folder) as processes:
        script = processes.run(f"benchmarks.{name}", *flags)
        assert script.wait() == 0, script.text()
    return script.text()


def test_peers_that_are_not_installed_are_named() -> None:
    from benchmarks.accumulation import LOOPS, available
    from benchmarks.measure import MODULES, has_peer

    left_out = [name for name in MODULES if not has_peer(name)]
    assert sorted([*available(), *left_out]) == sorted(LOOPS)
