r"""Text from outside as it may be shown: on a terminal, in a log, on a plot, as a metric's tag.

A device, a task or a file may choose such a text. ``printable`` is the one place that makes it
harmless: control characters, bidirectional overrides and line breaks become escapes (ESC becomes
\x1b), so it cannot move the cursor, change colours, reverse the text after it or begin another
line. What draws it must still treat it as text and not as markup: ``rich.text.Text`` or ``escape``.
"""

from __future__ import annotations

# A name in a table, a legend or a line of progress.
MAX_NAME_CHARACTERS = 64


def printable(text: object, *, max_characters: int | None = None) -> str:
    r"""Return a text with its control characters as escapes: ESC becomes \x1b.

    A text longer than ``max_characters``, at least 4, loses its middle, in whose place is "..".
    """
    shown = str(text)
    if max_characters is not None:  # before escaping it all: it may be very long
        shown = _shortened(shown, max_characters)
    shown = "".join(sign if sign.isprintable() else _escaped(sign) for sign in shown)
    return shown if max_characters is None else _shortened(shown, max_characters)


def printable_name(text: object) -> str:
    """Return a name as ``printable`` does, in at most 64 characters."""
    return printable(text, max_characters=MAX_NAME_CHARACTERS)


def printable_lines(text: str) -> str:
    """Return a text of several lines with all other control characters as escapes."""
    return "\n".join(map(printable, text.split("\n")))


def plot_label(text: object, *, max_characters: int = MAX_NAME_CHARACTERS) -> str:
    """Return a text as a label of matplotlib: not a formula ($), and not hidden (a leading _)."""
    return printable(text, max_characters=max_characters).lstrip("_ ").replace("$", r"\$")


def _shortened(text: str, max_characters: int) -> str:
    if len(text) <= max_characters:
        return text
    half = max_characters // 2 - 1
    return f"{text[:half]}..{text[-half:]}"


def _escaped(sign: str) -> str:
    return sign.encode("unicode_escape").decode("ascii")
