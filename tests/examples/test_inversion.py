"""The attack of examples/inversion.py finds what plain updates show, and nothing behind masks."""

from pathlib import Path

import pytest

from examples.inversion import cases, draw

KNOWS_THE_MEAN = 0.27
"""The error of a guess that knows only the mean of all images."""


@pytest.mark.slow
@pytest.mark.long
def test_a_plain_update_shows_its_image_and_a_masked_one_shows_nothing(tmp_path: Path) -> None:
    found = cases()
    errors = {case.title: case.error for case in found}
    assert errors["plain update of 1 image"] < 1e-4
    assert errors["plain update of 8 images"] < 0.1
    assert errors["masked update of 1 image"] > KNOWS_THE_MEAN
    assert errors["1 image, clipped and with noise"] > KNOWS_THE_MEAN
    # A sum of many images is not safe for that reason alone: some can be recognised.
    assert 0.1 < errors["opened sum of 10 devices"] < KNOWS_THE_MEAN
    draw(found, str(tmp_path / "inversion.png"))
    assert (tmp_path / "inversion.png").read_bytes().startswith(b"\x89PNG")
