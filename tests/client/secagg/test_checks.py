"""The security page lists every check, and names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headwater.client.secagg.checks import CHECKS, Check
from headwater.common.secagg.protocol import PHASES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_check_of_a_device_is_on_the_security_page(check: Check) -> None:
    assert f"| {check.action} | {check.holds} | `{check.error.__name__}` |" in PAGE


def test_checks_have_names_of_their_own_and_belong_to_phases() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    actions = {action for check in CHECKS for action in check.action.split(", ")}
    assert actions == {phase.action for phase in PHASES} | {"any"}


def test_every_test_that_the_security_page_names_is_there() -> None:
    named = re.findall(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\)", PAGE)
    assert len(named) > 20
    for test, path in named:
        assert f"def {test}(" in (ROOT / path).read_text(), (test, path)


def test_every_file_that_the_security_page_links_to_is_there() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
