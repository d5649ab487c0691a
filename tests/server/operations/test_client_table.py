"""The clients of a large round are a table beside its line, and read as they were in the line."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

import headwater
from headwater.common.errors import SettingsError, StateError
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.server.operations import client_table
from headwater.server.operations.client_table import ClientTable
from headwater.server.operations.log_limits import RowsFile, older_file, tables_beside
from headwater.server.operations.round_log import (
    MAX_IN_LINE,
    ROUNDS,
    RoundLog,
    read_rows,
    row_of_line,
    rows_in,
)
from headwater.server.rounds.round_row import ClientRows, RoundRow
from headwater.simulation.compute import batched
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.run import run_engine

NUM_CLIENTS = MAX_IN_LINE + 4


def simulate(out: Path, *, clients: int = NUM_CLIENTS, **changes: Any) -> list[RoundRow]:
    """Run a simulation that writes its rows; return them as the run had them."""
    rows: list[RoundRow] = []
    settings = Settings.model_validate(
        {
            "task": "examples/digits.py:Digits",
            "rounds": 3,
            "threads": 1,
            "out": out,
            "plan": {"accumulation_steps": 2, "micro_batch_size": 4},
            **changes,
            "simulation": {"clients": clients, **changes.get("simulation", {})},
        }
    )
    run_engine(settings, on_round=rows.append, resume=False)
    return rows


def as_read(row: RoundRow) -> list[dict[str, Any]]:
    """Return what a line would say of the clients, with null for what is no number."""
    text = json.dumps([dataclasses.asdict(client) for client in row.clients])
    found: list[dict[str, Any]] = json.loads(text, parse_constant=lambda _: None)
    return found


LOCAL: dict[str, Any] = {"local": {"steps": 2}}


@pytest.mark.parametrize(
    ("compute", "changes"),
    [
        ("fused", {}),
        ("fused", {"seed": 7, "plan": {}}),
        ("vectorised", {}),
        ("vectorised", LOCAL),
        ("one-by-one", LOCAL),
    ],
)
def test_a_large_round_reads_as_its_clients_were(
    tmp_path: Path, compute: str, changes: dict[str, Any]
) -> None:
    rows = simulate(tmp_path, simulation={"compute": compute}, **changes)
    lines = (tmp_path / ROUNDS).read_text().splitlines()
    assert max(map(len, lines)) < 4000
    for row, read in zip(rows, read_rows(tmp_path), strict=True):
        assert len(read["clients"]) == len(row.clients) == NUM_CLIENTS
        assert [*read["clients"]] == as_read(row)
        assert read["clients"][-1] == as_read(row)[-1]
        assert read["clients"][1:3] == as_read(row)[1:3]


def test_clients_that_were_computed_in_several_blocks_are_in_the_order_of_the_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batched, "MAX_ROWS", 256)
    given = {"task": "examples/digits.py:Digits", "rounds": 2, "threads": 1, "out": tmp_path}
    chosen = load(None, {**given, "simulation.clients": 100, "simulation.compute": "fused"})
    rows: list[RoundRow] = []
    run_engine(with_fleet(chosen), on_round=rows.append, resume=False)
    for row, read in zip(rows, read_rows(tmp_path), strict=True):
        assert isinstance(row.clients, ClientRows)
        accepted = row.clients._accepted
        assert len(accepted.blocks) > 1
        assert [*read["clients"]] == as_read(row)
        turned = ClientRows(accepted, dict(reversed(list(row.clients.plans.items()))))
        assert [*ClientTable.of(turned.columns())] == as_read(row)[::-1]


def test_a_small_round_stays_in_its_line(tmp_path: Path) -> None:
    rows = simulate(tmp_path, clients=MAX_IN_LINE)
    line = json.loads((tmp_path / ROUNDS).read_text().splitlines()[0])
    assert row_of_line(line)["clients"] == as_read(rows[0])
    assert not tables_beside(tmp_path / ROUNDS).exists()


def test_a_run_that_a_standby_follows_has_no_tables(tmp_path: Path) -> None:
    """The standby's store has the lines of the log."""
    (row, *_) = simulate(tmp_path / "plain")
    settings = Settings.model_validate(
        {
            "task": "examples/digits.py:Digits",
            "out": tmp_path / "followed",
            "standby": {"shared_state": str(tmp_path / "shared")},
        }
    )
    log = RoundLog(draws_curves=False)
    log.started(settings, round_number=0, model=nn.Linear(1, 1))
    log.stepped(row)
    log.ended()
    line = json.loads((tmp_path / "followed" / ROUNDS).read_text())
    assert row_of_line(line)["clients"] == as_read(row)


def test_rows_after_the_checkpoint_go_with_their_tables(tmp_path: Path) -> None:
    simulate(tmp_path)
    before = [*read_rows(tmp_path)[0]["clients"]]
    tables = tables_beside(tmp_path / ROUNDS)
    place = json.loads((tmp_path / ROUNDS).read_text().splitlines()[0])["clients"]
    settings = Settings.model_validate({"task": "examples/digits.py:Digits", "out": tmp_path})
    log = RoundLog(draws_curves=False)
    log.started(settings, round_number=1, model=nn.Linear(1, 1))
    assert tables.stat().st_size == place["num_bytes"]
    log.ended()
    (row,) = read_rows(tmp_path)
    assert [*row["clients"]] == before


@pytest.mark.parametrize("damage", [b"", b"\0" * 40])
def test_a_damaged_table_is_named_and_the_rows_are_read(tmp_path: Path, damage: bytes) -> None:
    simulate(tmp_path)
    tables_beside(tmp_path / ROUNDS).write_bytes(damage)
    rows = read_rows(tmp_path)
    assert [row["round"] for row in rows] == [1, 2, 3]
    with pytest.raises(StateError, match=r"the clients' figures in .*rounds\.tables"):
        rows[0]["clients"][0]


def test_a_table_that_grows_without_end_or_is_told_too_long_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate(tmp_path)
    path, tables = tmp_path / ROUNDS, tables_beside(tmp_path / ROUNDS)
    first, second, third = map(json.loads, path.read_text().splitlines())
    monkeypatch.setattr(client_table, "MAX_BYTES", 1 << 20)
    bomb = zlib.compress(bytes(1 << 22))
    tables.write_bytes(bomb)
    first["clients"] |= {"at": 0, "num_bytes": len(bomb)}
    second["clients"]["num_bytes"] = 2**61
    third["clients"]["at"] = -1
    path.write_text("".join(json.dumps(row) + "\n" for row in (first, second, third)))
    rows = read_rows(tmp_path)
    assert [row["round"] for row in rows] == [1, 2]
    for row in rows:
        with pytest.raises(StateError, match="the clients' figures in"):
            row["clients"][0]


def test_a_full_file_takes_its_tables_along(tmp_path: Path) -> None:
    path = tmp_path / ROUNDS
    rows = RowsFile(path, is_bounded=True, max_bytes=400)
    for number in range(5):
        table = bytes([number]) * 100
        at = rows.write_table(table)
        rows.write(json.dumps({"round": number, "clients": {"at": at, "num_bytes": 100}}))
    rows.close()
    for one in (path, older_file(path)):
        for line in one.read_text().splitlines():
            row = json.loads(line)
            stored = tables_beside(one).read_bytes()[row["clients"]["at"] :][:100]
            assert stored == bytes([row["round"]]) * 100
    kept = [json.loads(line)["round"] for line in path.read_text().splitlines()]
    assert kept[-1] == 4


def test_what_is_not_finite_is_none_for_a_client_and_nan_in_a_column(tmp_path: Path) -> None:
    simulate(tmp_path, simulation={"compute": "vectorised"})
    stored: Any = next(rows_in(tmp_path))["clients"]
    assert stored[0]["step_gradient_norm"][0] is not None
    variance = stored.columns["gradient_variance"]
    plain = [value for client in stored for value in client["gradient_variance"]]
    assert [math.isnan(value) for value in variance] == [value is None for value in plain]
    assert np.isnan(variance).any()


@pytest.mark.parametrize("clients", [3, NUM_CLIENTS])
def test_a_run_s_records_are_columns_however_many_clients_it_has(
    tmp_path: Path, clients: int
) -> None:
    rows = simulate(tmp_path, clients=clients)
    records = headwater.load_rounds(tmp_path)
    assert records.rounds["round"].tolist() == [1, 2, 3]
    assert records.rounds["loss"].tolist() == [row.loss for row in rows]
    for name in rows[-1].metrics:
        found = records.rounds[f"metrics.{name}"][-1]
        assert found == rows[-1].metrics[name]
    assert set(map(len, records.clients.values())) == {3 * clients}
    in_second = records.clients["round"] == 2
    second = [dataclasses.asdict(client) for client in rows[1].clients]
    for name, column in records.clients.items():
        if name != "round":
            assert column[in_second].tolist() == [client[name] for client in second], name
    assert not records.masked_clients


def test_a_folder_without_rounds_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"rounds\.jsonl holds no rounds"):
        headwater.load_rounds(tmp_path)
