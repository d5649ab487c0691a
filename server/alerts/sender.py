"""Hands alerts to the operator's URL or command, from a thread of its own: no round waits."""

from __future__ import annotations

import json
import logging
import os
import queue
import shlex
import shutil
import subprocess
import threading
import urllib.request
from dataclasses import asdict, dataclass
from urllib.parse import urlsplit

from headwater.common.errors import SettingsError

log = logging.getLogger(__name__)

SECONDS = 10.0
"""What an attempt may take."""
PAUSES = (1.0, 10.0, 60.0)
"""Seconds before each further attempt."""
MAX_QUEUED = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Alert:
    """One message to the operator: a trouble has begun, or it is over."""

    text: str
    kind: str
    subject: str
    is_over: bool
    run: str
    at: str
    """In UTC, ISO 8601."""


class Sender:
    """Sends alerts in their order; what cannot be sent is logged, counted and dropped."""

    def __init__(self, target: str) -> None:
        """Take a URL, or a command line; ``$NAME`` is what that environment variable says.

        Raises:
            SettingsError: it is neither, or there is no such variable.
        """
        self.num_failures = 0
        self._target = _expanded(target)
        self._is_url = _is_url(self._target)
        self.shown = _shown(self._target, is_url=self._is_url)
        self._queue: queue.Queue[Alert | None] = queue.Queue(MAX_QUEUED)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="alerts", daemon=True)
        self._thread.start()

    def send(self, alert: Alert) -> None:
        """Queue an alert."""
        try:
            self._queue.put_nowait(alert)
        except queue.Full:
            self.num_failures += 1

    def close(self) -> None:
        """Send what waits, each once more at most, and end."""
        self._is_ending.set()
        self.send_end()
        self._thread.join(4 * SECONDS)

    def send_end(self) -> None:
        """Let the thread end after what waits."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            self.num_failures += 1

    def _run(self) -> None:
        while (alert := self._queue.get()) is not None:
            self._send(alert)

    def _send(self, alert: Alert) -> None:
        data = json.dumps(asdict(alert)).encode()
        why = ""
        for pause in (*PAUSES, 0.0):
            try:
                self._post(data) if self._is_url else self._call(data)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                why = str(error) or type(error).__name__
            else:
                return
            if self._is_ending.wait(pause) or not pause:
                break
        self.num_failures += 1
        why = why.replace(self._target, self.shown)
        log.warning("%s: the alert %r could not be sent: %s", self.shown, alert.text, why)

    def _post(self, data: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._target, data, headers, method="POST")
        with urllib.request.urlopen(request, timeout=SECONDS):
            pass

    def _call(self, data: bytes) -> None:
        command = shlex.split(self._target)
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        ended = subprocess.run(command, input=data, timeout=SECONDS, check=False, **quiet)  # type: ignore[call-overload]
        if ended.returncode:
            last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:]
            raise OSError(f"status {ended.returncode}: {' '.join(last)[:200]}")


def _expanded(target: str) -> str:
    if not target.startswith("$"):
        found = target
    elif (value := os.environ.get(target[1:])) is None:
        raise SettingsError(
            f"--notify {target}: there is no such environment variable",
            remedy="set it where the server starts, or name a URL or a command",
        )
    else:
        found = value
    try:
        command = shlex.split(found)
    except ValueError as error:
        raise SettingsError(
            f"--notify: {error}", remedy="quote the command as for a shell"
        ) from error
    if not command:
        raise SettingsError("--notify is empty", remedy="name a URL or a command")
    if not _is_url(found) and shutil.which(command[0]) is None:
        raise SettingsError(
            f"--notify {command[0]}: there is no such command, or it is not executable",
            remedy="name its whole path, and make it executable: chmod +x",
        )
    return found


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _shown(target: str, *, is_url: bool) -> str:
    """Return a target without what may be secret: of a URL its host, of a command its name."""
    if is_url:
        parts = urlsplit(target)
        return f"{parts.scheme}://{parts.hostname}"
    return shlex.split(target)[0]
