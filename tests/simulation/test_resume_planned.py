from __future__ import annotations

from pathlib import Path

from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds.run import MODEL
from headwater.simulation.run import run_engine


def planned(out: Path, rounds: int) -> Settings:
    return load(
        None,
        {
            "task": "examples/digits.py:Digits",
            "simulation.clients": 6,
            "rounds": rounds,
            "plan.effective_batch_size": 200,
            "threads": 1,
            "out": out,
        },
    )


def test_a_run_whose_quotas_are_planned_resumes_with_the_same_plans(tmp_path: Path) -> None:
    run_engine(planned(tmp_path / "whole", 4), on_round=lambda row: None, resume=False)
    run_engine(planned(tmp_path / "broken", 2), on_round=lambda row: None, resume=False)
    run_engine(planned(tmp_path / "broken", 4), on_round=lambda row: None, resume=True)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert (whole / MODEL).read_bytes() == (broken / MODEL).read_bytes()
    quotas = [
        [[client["num_examples"] for client in row["clients"]] for row in read_rows(folder)]
        for folder in (whole, broken)
    ]
    assert quotas[0] == quotas[1]
