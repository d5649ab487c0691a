"""Shows an exception of the user's own code: its text, and the user's file, line and code.

A task is called from deep inside this project, and it calls torch, numpy or pandas. A traceback of
sixty lines hides the one or two that the user wrote; only these are shown.
"""

from __future__ import annotations

import itertools
import os
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from headwater.common.errors import HeadwaterError, TaskFailed, system_remedy

# In a working copy the package is a folder of links: a file has two paths.
_ROOTS = {Path(__file__).parents[2], Path(__file__).resolve().parents[2]}
_OURS = tuple(
    f"{root / folder}{os.sep}"
    for root in _ROOTS
    for folder in ("client", "server", "common", "aggregator", "simulation")
)
_LIBRARIES = tuple(
    f"{folder}{os.sep}"
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
    for folder in {sysconfig.get_path(name), Path(sysconfig.get_path(name)).resolve()}
)
_PACKAGE_FOLDERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))

MAX_FRAMES = 4
MAX_CHARACTERS = 600  # of an exception's own text; pandas and torch can write pages


def described(error: BaseException) -> str:
    """Return an exception's type and text and, below it, the user's own frames.

    The frames look as in Python's tracebacks: file, line, function and code line. If none is the
    user's own, as when a library's class is the data set, the innermost frame outside of this
    project is shown.
    """
    text = str(error)
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]} ..."
    head = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return "\n".join([head, *_lines(user_frames(error))])


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the frames of the user's own code, the outermost first; at most ``MAX_FRAMES``."""
    if isinstance(error, SyntaxError) and error.filename is not None:
        line = (error.text or "").strip()
        return [traceback.FrameSummary(error.filename, error.lineno or 1, "the file", line=line)]
    frames = list(traceback.extract_tb(error.__traceback__))
    own = [frame for frame in frames if is_users(frame.filename)] or _called_by_us(frames)[-1:]
    # A comprehension is a frame of its own at the same line.
    own = own[:1] + [f for outer, f in itertools.pairwise(own) if not _is_inner(f, outer)]
    return own if len(own) <= MAX_FRAMES else [own[0], *own[1 - MAX_FRAMES :]]


def _called_by_us(frames: Sequence[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Return the frames outside of this project that come after one of it."""
    is_ours = [frame.filename.startswith(_OURS) for frame in frames]
    first = is_ours.index(True) if any(is_ours) else 0
    return [
        frame
        for frame, ours in zip(frames[first:], is_ours[first:], strict=True)
        if not ours and not frame.filename.startswith("<")
    ]


def user_line() -> str | None:
    """Return the innermost line of the user's code that is running now, as text; None if none."""
    frames = [frame for frame in traceback.extract_stack() if is_users(frame.filename)]
    return "\n".join(_lines(frames[-1:])) or None


def is_users(file: str) -> bool:
    """Return whether a source file is neither this project's nor a library's."""
    is_known = file.startswith(_OURS) or is_installed(file)
    return not is_known and not file.startswith("<")


def is_installed(file: str) -> bool:
    """Return whether a file or folder belongs to the standard library or an installed package."""
    inside = f"{file}{os.sep}"  # also of a library's folder itself
    return inside.startswith(_LIBRARIES) or any(name in inside for name in _PACKAGE_FOLDERS)


def _is_inner(inner: traceback.FrameSummary, outer: traceback.FrameSummary) -> bool:
    """Return whether a frame is a comprehension in the line of the frame that called it."""
    is_same = (inner.filename, inner.lineno) == (outer.filename, outer.lineno)
    return is_same and inner.name.startswith("<")


def own_traceback(error: BaseException) -> TracebackType | None:
    """Return an exception's traceback without the frames before this project's own code.

    The command's own frame, which hands over to the command line's libraries, does not count.
    """
    frames, entries = [], error.__traceback__
    while entries is not None:
        frames.append(entries)
        entries = entries.tb_next
    is_ours = [entry.tb_frame.f_code.co_filename.startswith(_OURS) for entry in frames]
    start = next((n for n in range(1, len(frames)) if is_ours[n]), 0)
    return frames[start] if frames else None


def is_allocation_failure(error: BaseException) -> bool:
    """Return whether an exception is an allocation failure, which torch raises as a RuntimeError.

    oneDNN, which computes convolutions, only says that it could not create something, and C++'s own
    exception is called ``std::bad_alloc``.
    """
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and (
            "can't allocate memory" in text
            or "bad_alloc" in text
            or text.startswith("could not create a ")
        )
    )


TASK_REMEDY = "correct the line that is shown; `headwater-client check` tries the task alone"


@contextmanager
def running(what: str, *, remedy: str = TASK_REMEDY) -> Iterator[None]:
    """Turn an exception of the user's code into a ``TaskFailed`` that says where it was raised.

    ``what`` is the subject of the message, such as ``train_examples``. Errors of this project and
    ``MemoryError`` pass.

    Raises:
        TaskFailed: the user's code raised an exception.
    """
    try:
        yield
    except (HeadwaterError, MemoryError):
        raise
    except Exception as error:
        raise TaskFailed(
            f"{what} failed: {described(error)}",
            remedy=system_remedy(str(error)) or remedy,
        ) from error


def _lines(frames: list[traceback.FrameSummary]) -> list[str]:
    return [
        line
        for frame in frames
        for line in (
            f'  File "{frame.filename}", line {frame.lineno}, in {frame.name}',
            *([f"    {frame.line}"] if frame.line else []),
        )
    ]
