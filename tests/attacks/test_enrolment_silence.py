"""Strangers who hold the enrolment port's slots with silence."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import pytest

from headwater.client.enrolment.join import join
from headwater.server.enrolment import enrolment_port
from tests.certificates import make_folder
from tests.enrolment import enrolment, token_at

pytestmark = pytest.mark.slow

WAIT_SECONDS = 60.0


def test_four_silent_addresses_leave_slots_for_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They held all 16."""
    monkeypatch.setattr(enrolment_port, "EXCHANGE_SECONDS", 2 * WAIT_SECONDS)
    monkeypatch.setattr(enrolment_port, "HANDSHAKE_SECONDS", 2 * WAIT_SECONDS)
    certs, waits = make_folder(tmp_path / "certs"), list[float]()
    with enrolment(certs) as port, contextlib.ExitStack() as stack:
        token = token_at(certs, port.port)
        for number in range(2, 6):
            for _ in range(16):
                silent = socket.create_connection(
                    ("127.0.0.1", port.port), WAIT_SECONDS, (f"127.0.0.{number}", 0)
                )
                stack.enter_context(silent)
        assert join(token, tmp_path / "device", wait=waits.append).name == "pi"
        assert not waits, "the device was turned away"
        assert port.refusals["TooManyAttempts"] == 4 * (16 - enrolment_port.MAX_OF_ADDRESS)


def test_a_silent_handshake_ends_before_its_exchange_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment_port, "EXCHANGE_SECONDS", 10 * WAIT_SECONDS)
    certs = make_folder(tmp_path / "certs")
    with enrolment(certs) as port:
        token_at(certs, port.port)
        # asyncio by itself waits for a minute.
        with socket.create_connection(("127.0.0.1", port.port), WAIT_SECONDS / 2) as silent:
            assert silent.recv(1) == b""
