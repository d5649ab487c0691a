"""Statistics over real processes: the command measures, prints, and a resumed run trains on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from examples.unscaled_table import houses
from headwater.client.enrolment.signing_identity import make_identity
from tests.processes import ROOT, Processes, free_port, rows

pytestmark = pytest.mark.slow

TASK = str(ROOT / "examples" / "unscaled_table.py") + ":UnscaledTable"
CLIENTS = 4
PLAN = ("--accumulation-steps", 2, "--micro-batch-size", 16, "--min-clients", CLIENTS)
ACTIVE = ("--secure-aggregation", "active")


def identities(folder: Path) -> list[Sequence[object]]:
    """Make an identity for each device; return the flags of its masks."""
    made = [make_identity(folder / f"key{part}", str(part))[0] for part in range(CLIENTS)]
    (folder / "allow-list").write_text("\n".join(one.line for one in made))
    common = (*ACTIVE, "--allow-list", folder / "allow-list")
    return [(*common, "--identity", folder / f"key{part}") for part in range(CLIENTS)]


@pytest.mark.parametrize("is_masked", [False, True], ids=["plain", "masked"])
def test_the_command_measures_and_a_resumed_run_trains_with_the_result(
    tmp_path: Path, is_masked: bool
) -> None:
    out, port = tmp_path / "out", free_port()
    flags: Sequence[object] = ACTIVE if is_masked else ()
    own = identities(tmp_path) if is_masked else [()] * CLIENTS
    with Processes(tmp_path) as processes:
        given = ("--task", TASK, "--listen", f"127.0.0.1:{port}", "--out", out, *PLAN, *flags)
        server = processes.start("server", "statistics", *given)
        for part in range(CLIENTS):
            which = ("--num-parts", CLIENTS, "--stay", *own[part])
            processes.client(port, part, *which, task=TASK)
        server.succeed()
        assert re.search(r"price +800 ", server.text())
        assert "to train with them: headwater-server --resume" in server.text()
        processes.run("server", "--resume", "--out", out, "--rounds", 4).succeed()
    found = json.loads((out / "statistics.json").read_text())
    inputs = torch.cat([houses(seed=p, num_houses=200).tensors[0] for p in range(CLIENTS)])
    mean = inputs.double().mean(0)
    widths = torch.tensor([1000.0, 300.0, 100_000.0, 30.0])
    assert (
        (torch.tensor(found["inputs"]["means"], dtype=torch.float64) - mean).abs()
        <= 2.0**-24 * widths
    ).all()
    assert [row["loss"] is None for row in rows(out)] == [True, False, False, False]
