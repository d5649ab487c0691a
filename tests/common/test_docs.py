from __future__ import annotations

from pathlib import Path

from headwater.common.settings.introspection import to_markdown

DOCS = Path(__file__).parents[2] / "docs"


def test_settings_page_is_what_make_docs_writes() -> None:
    assert (DOCS / "settings.md").read_text() == to_markdown()
