"""The functions at which the chaos tests kill a process exist under the names that they use."""

import importlib
from typing import Any

import pytest

from tests.chaos.deaths import POINTS


@pytest.mark.parametrize("name", POINTS)
def test_every_death_point_is_a_function_of_the_package(name: str) -> None:
    module_name, _, path = POINTS[name].target.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in path.split("."):
        found = getattr(found, part)
    assert callable(found)
