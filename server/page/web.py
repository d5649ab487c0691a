"""The page's web application: static files, the stream of changes, a device's history. All GET.

Nothing here changes a run. Every answer carries a content security policy under which the page runs
its own scripts alone, so that no text from a device can become code.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    JSONResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headwater.common.transport.tls import is_loopback
from headwater.server.page.hub import MAX_LISTENERS, Hub, Shown
from headwater.server.report.report import STATIC

FILES = {path.name: path for path in sorted(STATIC.iterdir()) if path.is_file()}
COOKIE = "headwater-page"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def page_app(shown: Shown, hub: Hub, *, token: str | None) -> ASGIApp:
    """Return the application; with a token, every request needs it, in the link or the cookie."""

    async def index(request: Request) -> Response:
        if token is not None and "token" in request.query_params:
            # The token leaves the address line, where a screenshot or the history would keep it.
            answer: Response = RedirectResponse("/", HTTPStatus.SEE_OTHER)
            answer.set_cookie(COOKIE, token, httponly=True, secure=True, samesite="strict")
            return answer
        return FileResponse(FILES["index.html"])

    async def file(request: Request) -> Response:
        path = FILES.get(request.path_params["name"])
        if path is None:
            return PlainTextResponse("there is no such file\n", HTTPStatus.NOT_FOUND)
        return FileResponse(path)

    async def device(request: Request) -> Response:
        return JSONResponse(shown.device(request.query_params.get("name", "")))

    async def changes(request: Request) -> Response:
        if hub.num_listeners >= MAX_LISTENERS:
            return PlainTextResponse("too many pages are open\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return StreamingResponse(_events(hub), media_type="text/event-stream")

    async def everything(request: Request) -> Response:
        return Response(hub.everything(), media_type="application/json")

    routes = [
        Route("/", index),
        Route("/static/{name}", file),
        Route("/device", device),
        Route("/changes", changes),
        Route("/state", everything),
    ]
    middleware = [Middleware(Guard, token=token), Middleware(GZipMiddleware, minimum_size=1000)]
    return Starlette(routes=routes, middleware=middleware)


async def _events(hub: Hub) -> AsyncIterator[str]:
    async with contextlib.aclosing(hub.listen()) as changes:
        async for event, text in changes:
            yield f"event: {event}\ndata: {text}\n\n"


class Guard:
    """Adds the headers to every answer; refuses requests without the token, or to another host."""

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        refused = self._refusal(Request(scope)) if scope["type"] == "http" else None
        await (refused or self._app)(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that is not allowed; None if it is."""
        if self._token is None:
            # A web site that resolves its own name to 127.0.0.1 must not read the page.
            if is_loopback(_host_of(request)):
                return None
            return PlainTextResponse("open this page by its own address\n", HTTPStatus.BAD_REQUEST)
        given = request.query_params.get("token") or request.cookies.get(COOKIE, "")
        if secrets.compare_digest(given.encode(), self._token.encode()):
            return None
        return PlainTextResponse(
            "this page needs the link with its token, which the server printed\n",
            HTTPStatus.FORBIDDEN,
        )


def _host_of(request: Request) -> str:
    """Return the host that a request names, without its port; an IPv6 address has brackets."""
    host = request.headers.get("host", "")
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
