"""An HTTP proxy that devices connect through, as a company's network may have one: tinyproxy."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from pathlib import Path

from tests.processes import free_port, until

SETTINGS = """
Port {port}
Listen 127.0.0.1
LogFile "{log}"
LogLevel Connect
PidFile "{folder}/tinyproxy.pid"
Allow 127.0.0.1
{more}
"""
USER, PASSWORD, OTHER_PASSWORD = "fleet", "brook", "river"


def program() -> str | None:
    """Return where tinyproxy lies; None if it is not installed."""
    return shutil.which("tinyproxy")


def own_address() -> str | None:
    """Return an address of this machine that is not loopback; None if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plain:
        try:
            plain.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return None
        return str(plain.getsockname()[0])


class HttpProxy:
    """A proxy on loopback, at the same port each time that it is started."""

    def __init__(self, folder: Path, *, user: str = "") -> None:
        """``user`` is what devices say to it, as USER:PASSWORD."""
        self.log = folder / "tinyproxy.log"
        self._folder = folder
        self._port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"http://{user}{'@' if user else ''}127.0.0.1:{self._port}"

    def start(self, more: str = "") -> None:
        """Start it with further lines of settings, and wait until it answers."""
        path = self._folder / "tinyproxy.conf"
        path.write_text(
            SETTINGS.format(port=self._port, log=self.log, folder=self._folder, more=more)
        )
        command = [program() or "tinyproxy", "-d", "-c", str(path)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        until(self._answers, what=lambda: "tinyproxy")

    def kill(self) -> None:
        """End it, and all connections through it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with socket.socket() as plain, contextlib.suppress(OSError):
            return plain.connect_ex(("127.0.0.1", self._port)) == 0
        return False
