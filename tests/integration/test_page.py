"""The page in a real browser: a server with three clients, a simulation, a finished run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from headwater.server.operations.round_log import REPORT
from headwater.server.report.report import write_report
from tests.browser import IS_SHOWN, Tab, chromium, move_all_sliders, move_slider, tab
from tests.processes import Process, Processes, port_of, rows, write_task
from tests.round_rows import row
from tests.server.report.test_replay import write

pytestmark = pytest.mark.slow

VILLAGE = Path(__file__).resolve().parents[2] / "examples" / "fleets" / "village.toml"
K, DONE = 4, 2
HOSTILE = "<img src=x onerror=document.title='taken'>"
FIRST_TILE = "document.querySelector('.tile')?.getAttribute('aria-label')"
DONE_ROUNDS = "run.status.round"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


def page_of(process: Process) -> str:
    return process.wait_for(r"page at (\S+)").group(1)


def assert_rates(page: Tab, lines: list[dict[str, Any]]) -> None:
    """Compare the page's speeds with those of the last twenty rounds in rounds.jsonl.

    They are without the time for which the server waited for devices to connect.
    """
    lines = lines[-20:]
    virtual = [line["virtual_seconds"] for line in lines]
    real = [line["seconds"] - line["seconds_split"]["wait"] for line in lines]
    total = sum(real if virtual[0] is None else virtual)
    num_examples = sum(line["num_examples"] for line in lines)
    epoch = lines[-1]["num_epoch_examples"]
    assert page.page.evaluate("rates(run.points.slice(-20))") == {
        "updatesPerHour": pytest.approx(3600 * len(lines) / total),
        "examplesPerSecond": pytest.approx(num_examples / total),
        "secondsPerEpoch": pytest.approx(epoch / (num_examples / total)),
        "epochExamples": epoch,
    }
    assert "Epoch" in page.text("#figures")


def test_a_page_fills_k_as_a_device_works_and_agrees_with_the_rounds_on_disk(
    browser: Browser, tmp_path: Path
) -> None:
    task = write_task(tmp_path, open_for=DONE)
    plan = ("--accumulation-steps", K, "--micro-batch-size", 8, "--min-clients", 3)
    with Processes(tmp_path) as processes:
        server = processes.server("--rounds", 3, *plan, "--page", "127.0.0.1:0", task=task.spec)
        url, port = page_of(server), port_of(server)
        with tab(browser, url) as page:
            page.wait_for("run.status.phase === 'waiting for devices'")
            clients = [
                processes.client(port, i, "--num-parts", 3, task=task.spec) for i in range(3)
            ]
            task.wait_until_reached()
            page.wait_for(f"({FIRST_TILE} ?? '').includes('{DONE} done')")
            assert "K 4" in page.page.locator(".tile").first.inner_text()
            assert "computing" in page.text("#counts")
            task.open()
            for process in (*clients, server):
                process.succeed()
            page.wait_for("run.status.has_ended")
            page.wait_for("document.querySelector('#state').textContent === 'ended'")
            last = rows(tmp_path / "out")[-1]
            assert page.page.evaluate(DONE_ROUNDS) == last["round"] == 3
            assert page.page.evaluate("run.points.at(-1).loss") == last["loss"]
            assert page.page.evaluate("run.points.at(-1).client_split") == last["client_seconds"]
            assert_rates(page, rows(tmp_path / "out"))
            assert "devices: 3 done" in page.text("#counts")
    for line in rows(tmp_path / "out"):
        parts, own = line["client_seconds"], line["seconds_split"]
        assert min(parts["down"], parts["compute"], parts["up"]) > 0
        assert sum(parts.values()) == pytest.approx(own["train"] + own["fold"])
    report = (tmp_path / "out" / REPORT).as_uri()
    with tab(browser, report) as page:
        page.wait_for("document.querySelectorAll('.tile').length === 3")
        page.page.locator(".tile").first.click()
        page.wait_for("document.querySelector('#device svg polyline')")  # drawn in the next frame


def test_a_simulation_is_watched_replayed_and_pleasing_to_axe(
    browser: Browser, tmp_path: Path
) -> None:
    with Processes(tmp_path) as processes:
        run = tmp_path / "run"
        simulation = processes.start(
            *("simulation", "--fleet", VILLAGE, "--rounds", 100_000, "--out", run),
            *("--page", "127.0.0.1:0", "--evaluate-every", 5, "--micro-batch-size", 4),
        )
        with tab(browser, page_of(simulation)) as page:
            page.wait_for(f"{DONE_ROUNDS} >= 30")
            page.take_picture("page")
            seen = page.page.evaluate(DONE_ROUNDS)
            page.wait_for(f"{DONE_ROUNDS} > {seen}")
            page.page.select_option("#span", "20")
            page.page.select_option("#axis", "time")
            page.wait_for("document.querySelector('.chart svg polyline') !== null")
            found = page.page.evaluate("run.points.slice(5, 10)")
            page.page.select_option("#look", "table")
            assert page.page.locator("tbody tr").count() == 20
            page.page.fill("#find", "19")
            assert page.page.locator("tbody tr").count() == 1
            simulation.kill(2)
            page.wait_for("run.status.has_ended")
            page.wait_for("document.querySelector('#state').textContent === 'ended'")
            simulation.wait()
            assert_rates(page, rows(run))
        by_round = {line["round"]: line for line in rows(run)}
        for point in found:
            assert point["loss"] == by_round[point["round"]]["loss"]
            assert point["bytes_up"] == by_round[point["round"]]["bytes_up"]

        replay = processes.start("simulation", "replay", run, "--page", "127.0.0.1:0")
        url = page_of(replay).rstrip(";")
        for width, theme in ((1440, "light"), (390, "dark")):  # no rule has both
            with tab(browser, url, width=width, theme=theme) as page:
                page.wait_for("document.querySelectorAll('.tile').length === 20")
                assert page.page.evaluate(
                    "document.documentElement.scrollWidth <= window.innerWidth"
                )
                assert page.faults() == []
                page.page.keyboard.press("Tab")
                assert page.page.evaluate("document.activeElement.className") == "skip"
                page.page.locator(".tile").first.focus()
                page.page.keyboard.press("Enter")
                page.page.wait_for_selector("#device[open]")
                assert page.faults() == []
        replay.kill(2)
        replay.wait()


def test_texts_from_devices_stay_texts(browser: Browser, tmp_path: Path) -> None:
    folder = write(
        tmp_path / "run",
        *[row(n, "a", HOSTILE, metrics={HOSTILE: 0.5}, left_out={"a": HOSTILE}) for n in (1, 2, 3)],
    )
    write_report(folder)
    with tab(browser, (folder / REPORT).as_uri()) as page:
        page.wait_for("document.querySelectorAll('.tile').length === 2")
        page.page.locator(".tile").first.click()
        page.wait_for("document.querySelector('#device svg')")  # drawn in the next frame
        assert page.page.locator("img").count() == 0
        assert "taken" not in page.page.title()
        assert HOSTILE in page.text("#device") + page.text("#devices")


def test_a_phone_shows_twenty_of_a_hundred_devices_until_all_are_asked_for(
    browser: Browser, tmp_path: Path
) -> None:
    folder = write(tmp_path / "run", row(1, *(f"device-{part:02}" for part in range(100))))
    write_report(folder)
    number, height = "document.querySelectorAll('.tile').length", "document.body.scrollHeight"
    with tab(browser, (folder / REPORT).as_uri(), width=390) as page:
        page.wait_for(f"{number} === 20")
        few = page.page.evaluate(height)
        assert page.page.evaluate("document.querySelector('#fleet').offsetHeight") < 2 * 844
        assert page.text("#more") == "Show all 100 devices"
        page.page.click("#more")
        page.wait_for(f"{number} === 100")
        assert page.page.evaluate(height) > few + 2 * 844
    with tab(browser, (folder / REPORT).as_uri()) as page:
        page.wait_for(f"{number} === 100")
        assert "Share of weight" in page.text("#figures")


def test_beyond_loopback_the_link_has_tls_and_a_token(browser: Browser, tmp_path: Path) -> None:
    task = write_task(tmp_path)
    with Processes(tmp_path) as processes:
        plain = processes.server("--page", "0.0.0.0:0", task=task.spec)
        assert plain.wait() == 2
        assert "InsecureAddress" in plain.text()
        processes.run("server", "init", "--folder", tmp_path / "certs", "--host", "127.0.0.1")
        server = processes.server(
            *("--config", tmp_path / "certs" / "server.toml", "--page", "0.0.0.0:0"),
            *("--min-clients", 1),
            task=task.spec,
        )
        found = re.fullmatch(r"https://0\.0\.0\.0:(\d+)/\?token=(\S+)", page_of(server))
        assert found is not None
        port, token = found.groups()
        with tab(
            browser, f"https://127.0.0.1:{port}/?token={token}", ignore_https_errors=True
        ) as page:
            page.wait_for("run.status.phase === 'waiting for devices'")
            assert token not in page.page.url
        refused = browser.new_page(ignore_https_errors=True)
        answer = refused.goto(f"https://127.0.0.1:{port}/")
        assert answer is not None
        assert answer.status == 403
        refused.close()


def test_every_slider_of_the_guide_works_and_each_break_shows_its_error(
    browser: Browser, tmp_path: Path
) -> None:
    with Processes(tmp_path) as processes:
        guide = processes.start("simulation", "guide", "--page", "127.0.0.1:0")
        url = guide.wait_for(r"guide at (\S+);").group(1)
        with tab(browser, url) as page:
            page.wait_for(IS_SHOWN)
            page.page.click("#loop-jump")
            page.take_picture("guide", height=1560)
            page.page.evaluate("moveTo(0)")
            ways = page.page.evaluate("shown.sums.ways.map((way) => way.error)")
            assert ways[0] < 1e-6
            assert min(ways[1:]) > 1e-3
            assert page.page.locator("#sums-rows tr").count() == len(ways)
            assert move_all_sliders(page) > 20
            page.page.click("#loop-jump")
            assert "1 of 7 micro-batches" in page.text("#loop-verdict")
            page.page.click("#loop-next")
            assert page.page.locator("#loop-code [aria-current=step]").count() == 1
            page.page.click("#run-start")
            page.wait_for("shown.run?.points.length >= 2")
            move_slider(page, "run", "steps", "max")
            page.page.evaluate("shown.run = null")
            page.page.click("#run-start")
            page.wait_for("shown.run?.fault || shown.run?.points.length >= 1")
            assert page.page.evaluate("shown.run.fault") == ""
            assert page.faults() == []
        with tab(browser, url, width=390, theme="dark") as page:
            page.wait_for(IS_SHOWN)
            assert page.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
            assert page.faults() == []
        guide.kill(2)
        assert guide.wait() == 0
