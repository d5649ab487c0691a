"""compare.png can be read: names at the lines' ends, and axes that show small and large costs."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headwater.simulation.compare.plot import LINE_SHARE, apart, comparison_figure, draw_comparison
from headwater.simulation.compare.standing import Standing
from tests.simulation.compare.standings import curve, standing


@pytest.fixture(autouse=True)
def no_plot() -> None:
    """Draw plots, as these tests look at them."""


NEAR = [
    standing("exact", curve(0.4, 0.8, 0.90)),
    standing("fedavg", curve(0.5, 0.8, 0.91, examples_each=20.0)),
    standing("scaffold", curve(0.5, 0.7, 0.89, bytes_each=2.0)),
]


def panels(standings: list[Standing], metric: str = "test_accuracy") -> dict[str, Any]:
    figure = comparison_figure(standings, metric=metric, target=0.85)
    return {axes.get_xlabel(): axes for axes in figure.axes}


def test_axes_are_logarithmic_where_some_need_far_more_than_others() -> None:
    scales = {title: axes.get_xscale() for title, axes in panels(NEAR).items()}
    assert [title for title, scale in scales.items() if scale == "log"] == ["examples"]


def test_losses_that_are_far_apart_have_a_logarithmic_axis() -> None:
    far = [standing("exact", curve(2.0, 0.2, 0.02, is_smaller_better=True))]
    assert {axes.get_yscale() for axes in panels(far, "test_loss").values()} == {"log"}
    assert {axes.get_yscale() for axes in panels(NEAR).values()} == {"linear"}


def test_each_line_has_its_name_at_its_end_and_there_is_no_legend() -> None:
    for axes in panels(NEAR).values():
        assert axes.get_legend() is None
        names = [text.get_text() for text in axes.texts]
        assert sorted(names) == ["exact", "fedavg", "scaffold"]
        heights = sorted(text.xy[1] for text in axes.texts)
        assert all(high - low > LINE_SHARE - 1e-9 for low, high in pairwise(heights))
        assert all(0 < text.xy[0] < 1 - 0.1 for text in axes.texts)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=15).map(sorted))
def test_names_keep_apart_and_below_the_top(heights: list[float]) -> None:
    found = apart(heights)
    assert max(found) <= 1
    assert all(high - low >= LINE_SHARE - 1e-9 for low, high in pairwise(found))


@pytest.mark.parametrize("heights", [[0.1, 0.5, 0.9], [0.3]])
def test_names_that_are_apart_stay(heights: list[float]) -> None:
    assert apart(heights) == pytest.approx(heights)


def test_a_picture_is_written(tmp_path: Path) -> None:
    path = draw_comparison(tmp_path, NEAR, metric="test_accuracy", target=None)
    assert path is not None
    assert path.read_bytes().startswith(b"\x89PNG")
    assert draw_comparison(tmp_path, [], metric="test_accuracy", target=None) is None
