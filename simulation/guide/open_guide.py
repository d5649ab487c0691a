"""Serves the guide, on loopback alone: it computes whatever its reader asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headwater.common.errors import InsecureAddress
from headwater.common.transport.tls import is_loopback, split_address
from headwater.server.page.page_server import serving
from headwater.simulation.guide.run_lab import RunLab
from headwater.simulation.guide.web import guide_app


@contextmanager
def open_guide(address: str) -> Iterator[str]:
    """Serve the guide until the block ends; yield its address.

    Raises:
        InsecureAddress: the address is not a loopback address.
        PortInUse: the port cannot be opened.
        SettingsError: not HOST:PORT.
    """
    host, _ = split_address(address)
    if not is_loopback(host):
        raise InsecureAddress(
            f"--page {address} is not a loopback address, and the guide computes for its reader",
            remedy="use --page 127.0.0.1:8601 and reach it by `ssh -L 8601:127.0.0.1:8601 HOST`",
        )
    torch.set_num_threads(1)
    run = RunLab()
    with serving(guide_app(run), address, None) as link:
        try:
            yield link
        finally:
            run.stop()
