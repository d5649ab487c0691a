"""Serves a page from a thread of its own: on loopback as it is, elsewhere with TLS and a token."""

from __future__ import annotations

import asyncio
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from headwater.common.errors import InsecureAddress, PortInUse
from headwater.common.transport.tls import Credentials, is_loopback, split_address
from headwater.server.page.connections import PageConnections
from headwater.server.page.hub import Hub, Shown
from headwater.server.page.web import page_app

CLOSE_SECONDS = 2


def check_page_address(address: str, *, has_tls: bool) -> None:
    """Check that the page is on loopback, or that there are TLS files.

    Raises:
        InsecureAddress: neither.
        SettingsError: not HOST:PORT.
    """
    host, _ = split_address(address)
    if not (has_tls or is_loopback(host)):
        raise InsecureAddress(
            f"--page {address} is not a loopback address, and no TLS files are given",
            remedy="use --page 127.0.0.1:8600 and reach it by `ssh -L 8600:127.0.0.1:8600 HOST`, "
            "or give the server's certificate (headwater-server init)",
        )


@contextmanager
def page_of(shown: Shown, address: str, credentials: Credentials | None = None) -> Iterator[str]:
    """Serve a page until the block ends; yield its address, with the token if it needs one.

    When the block ends, open pages get the last state. Port 0 takes a free port.

    Raises:
        PortInUse: the port cannot be opened.
        InsecureAddress: see ``check_page_address``.
    """
    check_page_address(address, has_tls=credentials is not None)
    is_local = is_loopback(split_address(address)[0])
    token = None if is_local else secrets.token_urlsafe(24)
    hub = Hub(shown)
    app = page_app(shown, hub, token=token)
    with serving(app, address, None if is_local else credentials, hub=hub) as link:
        yield link if token is None else f"{link}?token={token}"


@contextmanager
def serving(
    app: ASGIApp, address: str, credentials: Credentials | None, *, hub: Hub | None = None
) -> Iterator[str]:
    """Serve a web application from a thread until the block ends; yield its address.

    Raises:
        PortInUse: the port cannot be opened.
        SettingsError: not HOST:PORT.
    """
    host, port = split_address(address)
    listener = _listener(host, port, address)
    shown_host = f"[{host}]" if ":" in host else host
    link = f"http{'' if credentials is None else 's'}://{shown_host}:{listener.getsockname()[1]}/"
    with listener:
        # The files are read at once: a kill must not leave the key behind.
        with tempfile.TemporaryDirectory(prefix="headwater-page-") as folder:
            files = {} if credentials is None else _tls_files(credentials, Path(folder))
            thread = _WebThread(app, listener, files, hub)
        thread.start()
        try:
            yield link
        finally:
            thread.close()


def _listener(host: str, port: int, address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise PortInUse(
            f"cannot listen on {address} for the page: {error.strerror}",
            remedy="choose another port with --page HOST:PORT",
        ) from error
    return listener


def _tls_files(credentials: Credentials, folder: Path) -> dict[str, str]:
    """Write certificate and key where uvicorn reads them; the folder is the owner's alone."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    certificate.write_bytes(credentials.certificate)
    key.touch(mode=0o600)
    key.write_bytes(credentials.key)
    return {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}


class _WebThread(threading.Thread):
    """The event loop of a web application: uvicorn, and the hub of open pages if there is one."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, files: dict[str, Any], hub: Hub | None
    ) -> None:
        super().__init__(name="page", daemon=True)
        self._hub = hub
        self._listener = listener
        self._has_loop = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._accepting: asyncio.Task[None]
        config = uvicorn.Config(
            app,
            **files,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=CLOSE_SECONDS,
        )
        config.load()  # here, so that what is wrong with it comes before the run begins
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        asyncio.run(self._serve())

    def close(self) -> None:
        """Send the last state to open pages, close them, and wait for the thread."""
        self._has_loop.wait()
        self._loop.call_soon_threadsafe(self._end)
        self.join()

    def _end(self) -> None:
        if self._hub is not None:
            self._hub.end()
        self._accepting.cancel()  # new connections would keep the server from its end
        self._server.should_exit = True

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        connections = PageConnections(self._listener, self._server)
        self._accepting = asyncio.create_task(connections.accept())
        ticks = None if self._hub is None else asyncio.create_task(self._hub.run())
        self._has_loop.set()
        await self._server.serve([])
        if self._hub is not None and ticks is not None:
            self._hub.end()
            await ticks
