"""The page's web application: static files, the stream of changes, a device's history. All GET.

Nothing here changes a run. Every answer carries a content security policy under which the page runs
its own scripts alone, so that no text from a device can become code.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncGenerator, AsyncIterator
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

from headwater.common.transport.tls import host_in, is_loopback
from headwater.server.page.hub import MAX_LISTENERS, Change, Hub, Shown
from headwater.server.report.report import STATIC

FILES = {path.name: path for path in sorted(STATIC.iterdir()) if path.is_file()}
COOKIE = "headwater-page"
OWN_SITES = ("same-origin", "none")  # none: the user typed the address
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
        changes = hub.listen()
        first = await anext(changes)  # counts this page before another one is answered
        return StreamingResponse(_events(first, changes), media_type="text/event-stream")

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


async def _events(first: Change, changes: AsyncGenerator[Change]) -> AsyncIterator[str]:
    async with contextlib.aclosing(changes):
        event, text = first
        yield f"event: {event}\ndata: {text}\n\n"
        async for event, text in changes:
            yield f"event: {event}\ndata: {text}\n\n"


class Guard:
    """Adds the headers; refuses requests of other sites, to other hosts or without the token."""

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
        # A link elsewhere may open the page, and no other site may make the browser do more.
        if request.url.path != "/" and not _is_of_page(request):
            return PlainTextResponse("another site may not ask this page\n", HTTPStatus.FORBIDDEN)
        if self._token is None:
            # A web site that resolves its own name to 127.0.0.1 must not read the page.
            if is_loopback(host_in(request.headers.get("host", ""))):
                return None
            return PlainTextResponse("open this page by its own address\n", HTTPStatus.BAD_REQUEST)
        given = request.query_params.get("token") or request.cookies.get(COOKIE, "")
        if secrets.compare_digest(given.encode(), self._token.encode()):
            return None
        return PlainTextResponse(
            "this page needs the link with its token, which the server printed\n",
            HTTPStatus.FORBIDDEN,
        )


def _is_of_page(request: Request) -> bool:
    """Return whether no page of another site made the browser send a request."""
    host = request.headers.get("host", "")
    origin = request.headers.get("origin", f"://{host}").partition("://")[2]
    return origin == host and request.headers.get("sec-fetch-site", "none") in OWN_SITES
