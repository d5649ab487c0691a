"""An aggregator's port opens again after an error; its devices' deadlines leave the sum time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from torch import nn

from headwater.aggregator.branch import (
    LEAST_SHARE,
    MOST_SHARE,
    UNKNOWN_SHARE,
    UPLOAD_FACTOR,
    Branch,
    devices_share,
)
from headwater.common.errors import CertificateProblem
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import Settings
from headwater.server.enrolment.authority import CA_FILE, CA_KEY_FILE
from headwater.server.enrolment.token_registry import REGISTRY_FILE
from tests.processes import free_port


@pytest.mark.parametrize(
    ("num_bytes", "rate", "share"),
    [
        (8_000_000, None, UNKNOWN_SHARE),
        (8_000_000, 1e6, 1 - UPLOAD_FACTOR * 8 / 100),
        (8_000, 1e9, MOST_SHARE),
        (8_000_000_000, 1e6, LEAST_SHARE),  # it cannot arrive: half of the time is the devices'
    ],
)
def test_the_upload_s_time_is_left_of_the_deadline(
    num_bytes: int, rate: float | None, share: float
) -> None:
    found = devices_share(100.0, upload_bytes=num_bytes, bytes_per_second=rate)
    assert found == pytest.approx(share)


@pytest.mark.slow  # a port of gRPC
def test_a_port_that_could_not_be_opened_whole_is_free_for_the_next_attempt(tmp_path: Path) -> None:
    for name in (CA_FILE, CA_KEY_FILE, REGISTRY_FILE):
        (tmp_path / name).write_text("damaged")
        (tmp_path / name).chmod(0o600)
    server = {"listen": f"127.0.0.1:{free_port()}", "upstream": "127.0.0.1:1"}
    settings = Settings.model_validate({"server": server, "tls": {"ca": tmp_path / CA_FILE}})
    image = ModelImage(nn.Linear(2, 1))
    branch = Branch("north", settings, None, image, must_end=threading.Event())
    for _ in range(2):  # the second attempt finds the same fault, and no port in use
        with pytest.raises(CertificateProblem):
            branch.enter(1)
