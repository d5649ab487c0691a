"""The spool's file: which one is believed, how often it is written, and when it is removed."""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from headwater.client.features import train_round
from headwater.client.flower.request import SIMULATED, SPOOL, spool_of
from headwater.client.training.sampler import SamplerPosition
from headwater.common.messages import Plan
from headwater.common.model.parameters import build_model
from headwater.common.settings.schema import ClientSettings, Settings
from tests.client.training.power_cuts import (
    RUN,
    CutOff,
    PowerCut,
    assert_same,
    cut_off,
    device,
    done,
    seen_by,
    spool,
    window_of,
)
from tests.tasks import TwoLayers, examples
from tests.training_contexts import FakeClock, plan, training_context


def test_the_file_is_a_safetensors_file_that_only_its_owner_may_read(tmp_path: Path) -> None:
    cut_off(tmp_path / "new", plan(22, 4), at=2)
    (file,) = (tmp_path / "new").iterdir()
    assert file.name == f"pi-{RUN}.safetensors"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    expected = done(device(), plan(8, 4)).values_P
    assert torch.equal(load_file(file)["values_P"], expected)


OTHERS: dict[str, Callable[[Plan], tuple[Plan, dict[str, Any]]]] = {
    "round 1, not 2": lambda chosen: (chosen.model_copy(update={"round": 2}), {}),
    "version 0, not 5": lambda chosen: (chosen.model_copy(update={"model_version": 5}), {}),
    "plan": lambda chosen: (chosen.model_copy(update={"precision": "bfloat16"}), {}),
    "epoch 0, not 1": lambda chosen: (chosen, {"place": SamplerPosition(epoch=1)}),
    "offset 0, not 9": lambda chosen: (chosen, {"place": SamplerPosition(offset=9)}),
    "skipped [], not [3]": lambda chosen: (chosen, {"place": SamplerPosition(skipped=(3,))}),
    "other examples": lambda chosen: (chosen, {"positions": tuple(range(1, 23))}),
}


@pytest.mark.parametrize("reason", OTHERS)
def test_a_file_of_another_window_is_deleted_and_the_log_says_why(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = plan(22, 4)
    cut_off(tmp_path, chosen, at=2)
    other, changes = OTHERS[reason](chosen)
    context = device()
    part = replace(window_of(context, 22), **changes)
    with caplog.at_level(logging.WARNING):
        found = train_round(other, part, context, spool(tmp_path)).values_P
    assert any("is deleted" in text and reason in text for text in caplog.messages)
    assert torch.equal(found, train_round(other, part, device()).values_P)
    assert sum(seen_by(context)) == 22


def test_the_spool_of_another_model_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = plan(22, 4)
    cut_off(tmp_path, chosen, at=2)
    context = device()
    context.image.load(bytes(build_model(CutOff(), seed=4).buffer()))
    done(context, chosen, spool(tmp_path))
    assert "it belongs to another model" in caplog.text
    assert sum(seen_by(context)) == 22


def test_the_spool_of_another_layout_is_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut_off(tmp_path, plan(22, 4), at=2)
    context = training_context(TwoLayers(), examples(24))
    update = done(context, plan(22, 4), spool(tmp_path))
    assert "it belongs to layout" in caplog.text
    assert update.report.num_examples == 22


@lru_cache
def spooled() -> tuple[bytes, Tensor]:
    """Return the spool of a window after three micro-batches, and the whole window's sum."""
    with tempfile.TemporaryDirectory() as name:
        cut_off(Path(name), plan(22, 4), at=3)
        return spool(Path(name)).path.read_bytes(), done(device(), plan(22, 4)).values_P


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.booleans())
def test_the_sum_is_exact_whichever_byte_is_damaged(at: float, change: int, cuts: bool) -> None:
    content, expected_P = spooled()
    data = bytearray(content)
    position = int(at * len(data))
    data[position] ^= change
    with tempfile.TemporaryDirectory() as name:
        kept = spool(Path(name))
        kept.path.write_bytes(data[:position] if cuts else data)
        found = done(device(), plan(22, 4), kept)
    assert torch.equal(found.values_P, expected_P)


@pytest.mark.parametrize("left", [b"", b"\x00" * 8, b"\xff" * 64, b'\x02\0\0\0\0\0\0\0{}{"a":[]}'])
def test_a_file_in_another_format_is_deleted(
    left: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = spool(tmp_path, every_seconds=1e9)
    kept.path.write_bytes(left)
    assert done(device(), plan(22, 4), kept).report.num_examples == 22
    assert "is deleted: it is damaged" in caplog.text
    assert not kept.path.exists()


def test_a_disk_that_cannot_be_written_costs_one_warning_and_no_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    found = done(device(), plan(22, 4), spool(tmp_path / "file"))
    assert_same(found, done(device(), plan(22, 4)))
    (warning,) = caplog.messages
    assert warning.startswith("pi, round 1: the spool cannot be written, so a power cut would")


def test_only_files_of_the_client_s_old_runs_are_removed(tmp_path: Path) -> None:
    names = [
        "pi-6.safetensors",
        "pi-6.safetensors.part",
        "pi-2-6.safetensors",
        "pi-6.safetensors.bak",
    ]
    for name in [*names, "pi-5.safetensors"]:
        (tmp_path / name).write_bytes(b"")
    days_ago = (tmp_path / "pi-5.safetensors").stat().st_mtime - 8 * 86_400
    for name in names:
        os.utime(tmp_path / name, (days_ago, days_ago))
    cut_off(tmp_path, plan(22, 4), at=2)
    assert {path.name for path in tmp_path.iterdir()} == {
        *("pi-2-6.safetensors", "pi-6.safetensors.bak", "pi-5.safetensors"),
        f"pi-{RUN}.safetensors",
    }


def test_a_temporary_file_left_by_a_kill_is_removed_with_the_spool(tmp_path: Path) -> None:
    kept = spool(tmp_path)
    kept.path.with_name(kept.path.name + ".part").write_bytes(b"half of a sum")
    kept.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_spool_is_written_at_most_every_few_seconds(tmp_path: Path) -> None:
    # A micro-batch takes a second: written after the sixth, and after the twelfth.
    chosen = plan(22, 1)
    cut_off(tmp_path, chosen, at=5, every_seconds=6.0)
    assert not any(tmp_path.iterdir())
    cut_off(tmp_path, chosen, at=16, every_seconds=6.0)
    again = device()
    done(again, chosen, spool(tmp_path))
    assert len(seen_by(again)) == 22 - 12


class SlowDisk(FakeClock):
    """Advances a second at each reading outside of micro-batches."""

    def seconds(self) -> float:
        self.now += 1.0
        return self.now


def test_writing_to_a_slow_disk_takes_a_small_share_of_the_time(tmp_path: Path) -> None:
    # A write takes the second between two readings: twenty seconds pass before the next.
    chosen = plan(22, 1)
    context = replace(device(cut_at=10), clock=SlowDisk())
    with pytest.raises(PowerCut):
        done(context, chosen, spool(tmp_path, max_share=1 / 20))
    again = device()
    done(again, chosen, spool(tmp_path))
    # Two clock readings and a second of work a micro-batch: after the first and the eighth.
    assert len(seen_by(again)) == 22 - 8


def test_only_a_node_with_a_spool_folder_has_a_spool(tmp_path: Path) -> None:
    run_config = Settings(client=ClientSettings(spool=tmp_path)).to_run_config()

    def context(**node_config: Any) -> Context:
        return Context(
            run_id=RUN,
            node_id=1,
            node_config=node_config,
            state=RecordDict(),
            run_config=run_config,
        )

    assert spool_of(context(**{SIMULATED: True}), "pi") is None
    found = spool_of(context(**{SPOOL: str(tmp_path)}), "pi")
    assert found is not None
    assert found.path == tmp_path / f"pi-{RUN}.safetensors"
