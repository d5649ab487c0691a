"""The documents as a site: every page, no request to elsewhere, and the whole Python API."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import headwater
from headwater.simulation.guide.run_lab import ROUNDS
from tests.browser import IS_SHOWN, chromium, move_all_sliders, tab

pytestmark = [
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.timeout(900),
]  # the guide computes its answers

ROOT = Path(__file__).resolve().parents[2]
LOADING = {"script": "src", "link": "href", "img": "src", "iframe": "src"}


class Loaded(HTMLParser):
    """The addresses that a page loads when it is opened."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "link" and given.get("rel") in ("canonical", "prev", "next"):
            return
        if tag in LOADING and (address := given.get(LOADING[tag])):
            self.found.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    config = ROOT / "docs" / "site" / "mkdocs.yml"
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", str(config)]
    done = subprocess.run(
        [*command, "--site-dir", str(folder)],
        capture_output=True,
        text=True,
        env={"PATH": "", "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder


def test_every_document_is_a_page_that_the_contents_name(site: Path) -> None:
    contents = (site / "index.html").read_text()
    documents = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert documents <= {path.stem for path in site.glob("*.html")}
    assert {name for name in documents if f'href="{name}.html"' not in contents} == set()


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    for path in site.glob("*.html"):
        page = Loaded()
        page.feed(path.read_text())
        assert [one for one in page.found if re.match(r"(https?:)?//", one)] == [], path.name


def test_the_guide_in_it_answers_at_each_end_of_every_slider(site: Path) -> None:
    guide = site / "guide"
    assert sum(path.stat().st_size for path in guide.rglob("*.*")) < 1_000_000
    assert 'href="guide/index.html"' in (site / "index.html").read_text()
    with chromium() as browser, tab(browser, (guide / "index.html").as_uri()) as page:
        page.wait_for(IS_SHOWN)
        assert f"Headwater {headwater.__version__}" in page.text("header")
        ways = page.page.evaluate("shown.sums.ways.map((way) => way.error)")
        assert ways[0] < 1e-6 < 1e-3 < min(ways[1:])
        assert move_all_sliders(page) > 20
        page.page.click("#run-start")
        assert len(page.page.evaluate("shown.run.points")) == ROUNDS
        assert page.faults() == []


def test_the_whole_public_api_is_described(site: Path) -> None:
    page = (site / "api.html").read_text()
    for name in set(headwater.__all__) - {"__version__"}:
        assert re.search(rf'id="headwater\.[\w.]*\.{name}"', page), name
