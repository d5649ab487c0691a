"""A device's files of frozen parts."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
import torch

from headwater.client.frozen.frozen_parts import FOLDER, FrozenFiles
from headwater.common.model.parameters import ModelImage
from tests.adapted import AdaptedNet

LIMIT = 1 << 30


def image(seed: int) -> ModelImage:
    torch.manual_seed(seed)
    return ModelImage(AdaptedNet())


def store(folder: Path, seed: int, *, limit_bytes: int = LIMIT) -> str:
    """Store the frozen part of a server's model; return its digest."""
    sent = image(seed)
    digest = sent.frozen_digest
    assert sent.fingerprint is not None
    FrozenFiles(folder, limit_bytes=limit_bytes).store(sent, sent.fingerprint)
    return digest


def load(folder: Path, digest: str) -> bool:
    """Load it as a process that starts anew."""
    started = image(0)
    has_it = FrozenFiles(folder, limit_bytes=LIMIT).load(started, digest)
    assert (started.frozen_digest == digest) == has_it
    return has_it


def test_a_restarted_device_loads_what_it_was_sent(tmp_path: Path) -> None:
    digest = store(tmp_path, 1)
    assert load(tmp_path, digest)
    assert not load(tmp_path, image(2).frozen_digest)


def test_only_the_owner_may_read_the_files(tmp_path: Path) -> None:
    store(tmp_path, 1)
    files = list((tmp_path / FOLDER).iterdir())
    assert [file.stat().st_mode & 0o777 for file in files] == [0o600]
    assert (tmp_path / FOLDER).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("place", [0, 9, -1])
def test_a_damaged_file_is_found_by_its_digest_and_deleted(
    place: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    digest = store(tmp_path, 1)
    file = tmp_path / FOLDER / f"{digest}.safetensors"
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)
    if place == 9:  # within the header, which the digest need not cover: the bytes are whole
        assert load(tmp_path, digest)
        return
    with caplog.at_level(logging.WARNING):
        assert not load(tmp_path, digest)
    assert "damaged" in caplog.text
    assert not file.exists()
    assert store(tmp_path, 1) == digest
    assert load(tmp_path, digest)


def test_the_least_recently_used_are_deleted_above_the_limit(tmp_path: Path) -> None:
    digests = [store(tmp_path, seed) for seed in (1, 2, 3)]
    for age, digest in zip((3, 1, 2), digests, strict=True):
        os.utime(tmp_path / FOLDER / f"{digest}.safetensors", (1000 - age, 1000 - age))
    size = (tmp_path / FOLDER / f"{digests[0]}.safetensors").stat().st_size
    digests.append(store(tmp_path, 4, limit_bytes=2 * size))
    assert [load(tmp_path, digest) for digest in digests] == [False, True, True, True]


def test_the_file_in_use_is_kept_however_small_the_limit(tmp_path: Path) -> None:
    first, second = (store(tmp_path, seed, limit_bytes=1) for seed in (1, 2))
    assert not load(tmp_path, first)
    assert load(tmp_path, second)


def test_what_a_killed_process_left_half_written_counts_towards_the_limit(tmp_path: Path) -> None:
    first = store(tmp_path, 1)
    half = tmp_path / FOLDER / f"{first}-1234.safetensors.part"
    half.write_bytes(b"half of a model")
    os.utime(half, (1000, 1000))
    store(tmp_path, 2, limit_bytes=(tmp_path / FOLDER / f"{first}.safetensors").stat().st_size)
    assert not half.exists()
    assert load(tmp_path, first)


def test_a_folder_that_cannot_be_written_costs_only_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("a file in the folder's place")
    with caplog.at_level(logging.WARNING):
        digest = store(tmp_path, 1)
    assert "sent it again" in caplog.text
    assert not FrozenFiles(tmp_path, limit_bytes=LIMIT).load(image(0), digest)
    assert "cannot be read" in caplog.text
