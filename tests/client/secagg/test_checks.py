"""The pages on security list every check of a client, and their links and test names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headwater.client.secagg.checks import CHECKS, Check
from headwater.common.secagg.protocol import PHASES

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = ("security.md", "secure-aggregation.md", "plain-rounds.md", "attacks.md")
PAGE = (DOCS / "secure-aggregation.md").read_text()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_the_page_of_the_masks_lists_every_check(check: Check) -> None:
    assert f"| {check.action} | {check.holds} | `{check.error.__name__}` |" in PAGE


def test_check_names_are_unique_and_their_actions_are_phases() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    actions = {action for check in CHECKS for action in check.action.split(", ")}
    assert actions == {phase.action for phase in PHASES} | {"any"}


def test_every_test_named_on_a_page_of_security_exists() -> None:
    text = "".join((DOCS / page).read_text() for page in PAGES)
    named = re.findall(r"\[(test_\w+)\]\(\.\./(tests/[\w/]+\.py)\)", text)
    assert len(named) > 60
    for test, path in named:
        assert f"def {test}(" in (ROOT / path).read_text(), (test, path)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_linked_from_a_page_of_security_exists(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", (DOCS / page).read_text()):
        assert (DOCS / target.partition("#")[0]).exists(), target
