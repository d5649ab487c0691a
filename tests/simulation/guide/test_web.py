"""The guide's web application: numbers out of range are cut, and a run is started and replaced."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headwater.common.errors import InsecureAddress
from headwater.common.settings.sources import load
from headwater.simulation.fleet.fleet_spec import with_fleet
from headwater.simulation.guide.open_guide import open_guide
from headwater.simulation.guide.run_lab import TASK, RunLab
from headwater.simulation.guide.web import FILES, LABS, Numbers, guide_app, run_settings


@pytest.fixture
def lab() -> Iterator[RunLab]:
    made = RunLab()
    yield made
    made.stop()


def get(
    lab: RunLab,
    path: str,
    url: str = "http://localhost",
    headers: dict[str, str] | None = None,
    **numbers: object,
) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=guide_app(lab))
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            params = {k: str(v) for k, v in numbers.items()}
            return await client.get(path, params=params, headers=headers)

    return asyncio.run(send())


@pytest.mark.parametrize("name", LABS)
@pytest.mark.parametrize("number", ["-1e300", "nan", "inf", "three", ""])
def test_whatever_is_asked_is_computed_within_its_range(
    lab: RunLab, name: str, number: str
) -> None:
    names = ["examples", "size", "batch", "limit", "devices", "colluders", "digit", "spread"]
    names += ["milliseconds", "megabytes", "link"]
    small = {"examples": 4, "batch": 4, "devices": 3} if number == "inf" else {}
    numbers: dict[str, Any] = {**dict.fromkeys(names, number), **small}
    answer = get(lab, f"/lab/{name}", **numbers)
    assert answer.status_code == 200
    assert answer.json()


def test_it_serves_its_files_to_loopback_alone(lab: RunLab) -> None:
    assert "A guide to play with" in get(lab, "/").text
    for name in FILES:
        assert get(lab, f"/static/{name}").status_code == 200
    assert get(lab, "/lab/nothing").status_code == 404
    assert get(lab, "/", url="http://evil.example").status_code == 400
    assert "script-src 'self'" in get(lab, "/").headers["content-security-policy"]
    with pytest.raises(InsecureAddress, match="guide"), open_guide("0.0.0.0:0"):
        pass


def test_a_page_of_another_site_cannot_make_it_compute(lab: RunLab) -> None:
    for site in ("cross-site", "same-site"):
        for path in ("/lab/memory", "/run/start"):
            answer = get(lab, path, headers={"sec-fetch-site": site})
            assert answer.status_code == 403
    assert lab.view is None
    assert get(lab, "/lab/memory", headers={"sec-fetch-site": "same-origin"}).status_code == 200


def test_settings_that_do_not_go_together_leave_no_file(
    lab: RunLab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    lab.start({"simulation.clients": 4, "plan.micro_batch_size": -1}, spread=2)
    assert lab.fault
    assert not [*tmp_path.iterdir()]


def wait_for(lab: RunLab, rounds: int) -> dict[str, Any]:
    end = time.monotonic() + 280
    while True:
        state: dict[str, Any] = get(lab, "/run/state").json()
        if len(state["points"]) >= rounds or state["fault"]:
            return state
        assert time.monotonic() < end, state
        time.sleep(0.02)


def test_a_run_is_watched_and_another_takes_its_place(lab: RunLab) -> None:
    assert get(lab, "/run/state").json()["points"] == []
    get(lab, "/run/start", devices=4, spread=2, size=8, examples=32, steps=1)
    first = wait_for(lab, 1)
    assert first["points"][0]["num_invited"] == 4
    get(lab, "/run/start", devices=3, spread=1, size=8, examples=32, steps=1)
    second = wait_for(lab, 1)
    assert second["points"][0]["round"] == 1
    assert second["points"][0]["num_invited"] == 3
    assert second["fault"] == ""


def test_the_sliders_of_a_run_go_together_at_all_their_ends() -> None:
    ends = {
        "devices": (3, 60),
        "size": (1, 64),
        "examples": (16, 2048),
        "dropout": (0, 0.9),
        "steps": (1, 32),
        "noise": (0, 10),
    }
    for chosen in itertools.product(*ends.values()):
        given = dict(zip(ends, map(str, chosen), strict=True))
        settings, _ = run_settings(Numbers(given))
        with_fleet(load(None, settings | {"task": TASK}))


@pytest.mark.slow
def test_local_steps_divide_the_examples_of_a_round(lab: RunLab) -> None:
    get(lab, "/run/start", devices=12, size=4, examples=192, steps=8)
    lab.finish()
    assert lab.fault == ""
    assert {point["num_examples"] for point in lab.state()["points"]} == {192}
