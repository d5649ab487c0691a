"""Which HTTP proxy leads to a server, by the variables that gRPC reads, and the way through it.

gRPC takes the first of ``grpc_proxy``, ``https_proxy`` and ``http_proxy`` (in small letters) for
each address, even for this machine's own, and asks it to CONNECT (RFC 9110, section 9.3.6).
``no_grpc_proxy``, or else ``no_proxy``, names hosts that need none. Here loopback never needs one.
Every connection of a device asks ``proxy_of``: ``doctor`` and ``join`` connect as the client does.
"""

from __future__ import annotations

import base64
import ipaddress
import os
import socket
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass

from headwater.common.transport.tls import is_loopback

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")
DEFAULT_PORT = 80
MAX_ANSWER_BYTES = 16_384


class ProxyRefused(ConnectionError):
    """The proxy did not connect to the server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proxy:
    """An HTTP proxy, and the environment variable that names it."""

    variable: str
    host: str
    port: int
    user: str = ""  # USER:PASSWORD

    def __str__(self) -> str:
        return f"the proxy {self.host}:{self.port} ({self.variable})"

    @property
    def uri(self) -> str:
        """The proxy as gRPC takes it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        user = urllib.parse.quote(self.user, safe=":") + "@" if self.user else ""
        return f"http://{user}{host}:{self.port}"


def proxy_of(host: str, environment: Mapping[str, str] = os.environ) -> Proxy | None:
    """Return the proxy that leads to a host; None without one.

    A proxy that does not speak HTTP (``https://``, ``socks5://``) is none: gRPC cannot use it.
    """
    variable = next((name for name in VARIABLES if environment.get(name)), None)
    if variable is None or is_loopback(host) or _is_exempt(host, environment):
        return None
    text = environment[variable]
    try:
        parts = urllib.parse.urlsplit(text if "://" in text else f"http://{text}")
        port = parts.port or DEFAULT_PORT
    except ValueError:
        return None
    if parts.scheme != "http" or not parts.hostname:
        return None
    user = ":".join(urllib.parse.unquote(one) for one in (parts.username, parts.password) if one)
    return Proxy(variable=variable, host=parts.hostname, port=port, user=user)


def _is_exempt(host: str, environment: Mapping[str, str]) -> bool:
    """Return whether a host is named, ends in a named domain, or is in a named network."""
    named = environment.get("no_grpc_proxy") or environment.get("no_proxy", "")
    return any(_names(one.strip(), host.lower()) for one in named.lower().split(",") if one.strip())


def _names(entry: str, host: str) -> bool:
    if entry in ("*", host) or host.endswith(f".{entry.lstrip('*.')}"):
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry)
    except ValueError:
        return False


def proxy_remedy(host: str) -> str:
    """Return what to change if a proxy does not lead to a host."""
    return f"no_proxy={host} connects without a proxy; else let the proxy CONNECT to this port"


def proxy_options(host: str) -> tuple[tuple[str, int | str], ...]:
    """Return the options that make a gRPC channel take ``proxy_of`` its host."""
    proxy = proxy_of(host)
    if proxy is None:
        return (("grpc.enable_http_proxy", 0),)
    return (("grpc.http_proxy", proxy.uri),)


def connect(host: str, port: int, *, timeout_seconds: float) -> socket.socket:
    """Connect to a server as the client does: through ``proxy_of`` its host, if there is one.

    Raises:
        ProxyRefused: the proxy cannot be reached, or does not connect to the server.
        OSError: the server cannot be reached.
    """
    proxy = proxy_of(host)
    if proxy is None:
        return socket.create_connection((host, port), timeout_seconds)
    try:
        plain = socket.create_connection((proxy.host, proxy.port), timeout_seconds)
    except OSError as error:
        raise ProxyRefused(f"{proxy} cannot be reached: {error.strerror or error}") from error
    try:
        _ask_for(plain, proxy, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    except BaseException:
        plain.close()
        raise
    return plain


def _ask_for(plain: socket.socket, proxy: Proxy, address: str) -> None:
    lines = [f"CONNECT {address} HTTP/1.1", f"Host: {address}"]
    if proxy.user:
        secret = base64.b64encode(proxy.user.encode()).decode()
        lines.append(f"Proxy-Authorization: Basic {secret}")
    plain.sendall("\r\n".join([*lines, "", ""]).encode())
    answer = b""
    while b"\r\n\r\n" not in answer:
        piece = plain.recv(1)  # what follows the answer is the server's
        answer += piece
        if not piece or len(answer) > MAX_ANSWER_BYTES:
            raise ProxyRefused(f"{proxy} did not answer as an HTTP proxy")
    status, _, reason = answer.split(b"\r\n")[0].decode("latin-1").partition(" ")
    if not status.startswith("HTTP/1.") or not reason.startswith("2"):
        raise ProxyRefused(f"{proxy} does not connect to {address}: {reason or status}")
