"""The checkpoint: back as it was written, or named as corrupt; never half of one."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from headwater.common.errors import CheckpointCorrupt, CheckpointFailed, SettingsError
from headwater.common.model.trained_model import MODEL, load_model
from headwater.common.settings.sources import load
from headwater.server.privacy.spent_budget import PRIVACY_FILE
from headwater.server.rounds import checkpoint
from headwater.server.rounds.checkpoint import FILE, Progress
from headwater.simulation.run import run_engine

PROGRESS = Progress(
    run_id=2**61 + 1,
    round=7,
    layout_digest="digest",
    optimizer='{"groups": []}',
    largest=[0.1, 2.0**-100],
    counted={"pi": 7, "laptop": 5},
    simulated={"1000": {"walk": {"epoch": 1}}},
    features={"scaffold": {"rounds": 3}, "plain": {"x": 1}},
)


def image_of(round_number: int, num_bytes: int = 44) -> Tensor:
    generator = torch.Generator().manual_seed(round_number)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


OPTIMIZER = {"0.exp_avg": torch.arange(5.0), "0.step": torch.tensor(3.0), "1.x": torch.zeros(0)}
FEATURES = {"scaffold": {"variates": torch.arange(3.0), "a.b": torch.ones(1)}}


def save(folder: Path, image_U8: Tensor | None = None) -> None:
    image_U8 = image_of(7) if image_U8 is None else image_U8
    checkpoint.save(folder, PROGRESS, image_U8=image_U8, optimizer=OPTIMIZER, features=FEATURES)


def test_a_checkpoint_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    save(tmp_path)
    found = checkpoint.load(tmp_path)
    assert found is not None
    optimizer = found.optimizer
    assert found.progress == PROGRESS
    assert torch.equal(found.image_U8, image_of(7))
    assert optimizer.keys() == OPTIMIZER.keys()
    for name, tensor in OPTIMIZER.items():
        assert torch.equal(optimizer[name], tensor)
        assert optimizer[name].shape == tensor.shape
    assert found.features.keys() == {"scaffold", "plain"}
    for name, tensor in FEATURES["scaffold"].items():
        assert torch.equal(found.features["scaffold"][name], tensor)


def test_a_folder_without_a_checkpoint_has_none(tmp_path: Path) -> None:
    assert checkpoint.load(tmp_path) is None


def test_nothing_but_the_checkpoint_is_left_in_the_folder(tmp_path: Path) -> None:
    save(tmp_path)
    save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_file_cut_off_anywhere_is_corrupt(tmp_path: Path) -> None:
    save(tmp_path)
    content = (tmp_path / FILE).read_bytes()
    for length in range(len(content)):
        (tmp_path / FILE).write_bytes(content[:length])
        with pytest.raises(CheckpointCorrupt, match=FILE):
            checkpoint.load(tmp_path)


def test_a_checkpoint_under_the_number_of_another_version_is_corrupt(tmp_path: Path) -> None:
    save(tmp_path)
    content = (tmp_path / FILE).read_bytes()
    assert content.count(b'"version": "3"') == 1
    (tmp_path / FILE).write_bytes(content.replace(b'"version": "3"', b'"version": "2"'))
    with pytest.raises(CheckpointCorrupt, match="SHA-256"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("extra", [b"\0", b"{}", bytes(64)])
def test_a_file_with_appended_bytes_is_corrupt(tmp_path: Path, extra: bytes) -> None:
    save(tmp_path)
    with (tmp_path / FILE).open("ab") as file:
        file.write(extra)
    with pytest.raises(CheckpointCorrupt):
        checkpoint.load(tmp_path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_bit_flipped_anywhere_is_corrupt(tmp_path: Path, data: st.DataObject) -> None:
    save(tmp_path)
    content = bytearray((tmp_path / FILE).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << bit % 8
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(CheckpointCorrupt):
        checkpoint.load(tmp_path)


def test_a_bit_flipped_in_each_byte_of_the_tensors_is_corrupt(tmp_path: Path) -> None:
    save(tmp_path)
    content = (tmp_path / FILE).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    assert start < len(content)
    for at in range(start, len(content)):
        changed = bytearray(content)
        changed[at] ^= 1
        (tmp_path / FILE).write_bytes(changed)
        with pytest.raises(CheckpointCorrupt, match="SHA-256"):
            checkpoint.load(tmp_path)


@pytest.mark.parametrize("metadata", [None, {}, {"version": "1"}, {"version": "99"}])
def test_another_safetensors_file_under_the_name_is_corrupt(
    tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    save_file({"image": image_of(1)}, tmp_path / FILE, metadata)
    with pytest.raises(CheckpointCorrupt):
        checkpoint.load(tmp_path)


def test_a_folder_in_the_checkpoints_place_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / FILE).mkdir()
    with pytest.raises(CheckpointCorrupt):
        checkpoint.load(tmp_path)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 64 KiB, where the machine lets us have one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_fails_by_name_and_leaves_the_old_checkpoint(full_disk: Path) -> None:
    save(full_disk)
    before = (full_disk / FILE).read_bytes()
    with pytest.raises(CheckpointFailed, match="round 7") as caught:
        save(full_disk, image_of(8, 2**17))
    assert "--resume" in caught.value.remedy
    assert [path.name for path in full_disk.iterdir()] == [FILE]
    assert (full_disk / FILE).read_bytes() == before
    assert checkpoint.load(full_disk) is not None


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_late_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    save(tmp_path)
    before = (tmp_path / FILE).read_bytes()

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    owner: object = os if call == "fsync" else Path
    monkeypatch.setattr(owner, call, fail)
    with pytest.raises(CheckpointFailed, match="Input/output error"):
        save(tmp_path, image_of(8))
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).read_bytes() == before


def test_a_private_round_is_not_begun_without_room_for_its_checkpoint(full_disk: Path) -> None:
    """Its noise is spent before its step is kept, and no other round has it back."""
    chosen: dict[str, Any] = {
        "task": "tests/tasks.py:TwoLayers",
        "out": full_disk,
        "rounds": 3,
        "plan.accumulation_steps": 2,
        "privacy.epsilon": 4.0,
        "privacy.unit": "example",
        "simulation.clients": 3,
    }
    with pytest.raises(CheckpointFailed, match="next round is not begun: its checkpoint takes"):
        run_engine(load(None, chosen), on_round=lambda _: None, resume=False)
    assert not (full_disk / PRIVACY_FILE).exists()


def test_a_part_left_by_a_killed_process_is_no_hindrance(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / (FILE + ".part")).write_bytes(b"half of a checkpoint")
    assert checkpoint.load(tmp_path) is not None
    save(tmp_path, image_of(8))
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize("has_model", [True, False])
def test_a_checkpoint_in_a_model_s_place_is_called_one(has_model: bool, tmp_path: Path) -> None:
    save(tmp_path)
    if has_model:
        (tmp_path / MODEL).write_bytes(b"")
    with pytest.raises(SettingsError, match="is a run's checkpoint") as caught:
        load_model(tmp_path / FILE)
    expected = str(tmp_path / MODEL) if has_model else f"--resume --out {tmp_path}"
    assert expected in caught.value.remedy
