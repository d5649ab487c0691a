"""docs/security.md lists every check of a client, and its links and test names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headwater.client.secagg.checks import CHECKS, Check
from headwater.common.secagg.protocol import PHASES

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "security.md").read_text()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_security_page_lists_every_check(check: Check) -> None:
    assert f"| {check.action} | {check.holds} | `{check.error.__name__}` |" in PAGE


def test_check_names_are_unique_and_their_actions_are_phases() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    actions = {action for check in CHECKS for action in check.action.split(", ")}
    assert actions == {phase.action for phase in PHASES} | {"any"}


def test_every_test_named_on_the_security_page_exists() -> None:
    named = re.findall(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\)", PAGE)
    assert len(named) > 20
    for test, path in named:
        assert f"def {test}(" in (ROOT / path).read_text(), (test, path)


def test_every_file_linked_from_the_security_page_exists() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target
