"""``headwater new``: writes a task's file, data to try it on, and what to do next."""

from __future__ import annotations

import pprint
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape

from headwater.common.errors import SettingsError
from headwater.common.system.atomic_file import write_atomically
from headwater.common.system.console import console, print_text
from headwater.common.user_code.bundled_examples import EXAMPLES, HOME
from headwater.common.wording import counted, in_shell
from headwater.simulation.new import made_up
from headwater.simulation.new.columns import DIGITS, Table, read_rows, table_of

TASK, README, DEVICES, TEST = "task.py", "README.md", "devices", "test"
BEGIN, END = "# begin: columns\n", "# end: columns\n"
OPTIMIZER = "--optimizer adam --learning-rate 0.01"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of task: its template, its class, and what its data are."""

    template: str
    name: str
    data: str
    """In words, of one device."""
    change: str
    """What a user changes first in the task's file."""
    suffix: str = ""
    """Of a device's data: a file of this kind, or a folder."""


KINDS = {
    "table": Kind(
        template="table",
        name="Table",
        data="a CSV file with a header row",
        change="`NUMBERS`, `CATEGORIES`, `LABEL` and `CLASSES`: the columns and what they hold",
        suffix=".csv",
    ),
    "regression": Kind(
        template="table",
        name="Table",
        data="a CSV file with a header row",
        change="`NUMBERS`, `CATEGORIES`, `LABEL` and `LABEL_RANGE`: the columns and their ranges",
        suffix=".csv",
    ),
    "series": Kind(
        template="series",
        name="Series",
        data="a CSV file with a header row and a value a line",
        change="`VALUE`, `VALUE_RANGE` and `PAST`: the column, its range, and how many count",
        suffix=".csv",
    ),
    "images": Kind(
        template="images",
        name="Images",
        data="a folder with a subfolder of pictures for each class",
        change="`CLASSES` and `SIDE`: the subfolders' names, and the pixels of a side",
    ),
    "text": Kind(
        template="text",
        name="Text",
        data="a folder of text files",
        change="`CONTEXT`, the bytes of a stretch, and the size of the network",
    ),
}


def new_task(
    kind: str, folder: Path, *, data: Path | None, label: str | None, num_devices: int
) -> None:
    """Write a task of a kind into a new folder, with data for some devices and a test.

    ``data`` is a CSV file of the user's, for tables and series; without it data are made up.

    Raises:
        SettingsError: the kind is none, the folder holds something, or the file cannot be used.
    """
    if kind not in KINDS:
        raise SettingsError(f"there is no kind {kind!r}", remedy=f"name one of {', '.join(KINDS)}")
    chosen = KINDS[kind]
    if data is not None and not chosen.suffix:
        raise SettingsError(
            f"--csv is for tables and series, and {kind} are {chosen.data}",
            remedy=f"leave it out, and put your own into {folder / DEVICES}",
        )
    if folder.exists() and any(folder.iterdir()):
        raise SettingsError(f"{folder} holds something", remedy="name a new folder")
    parts, test, columns, notes = _contents(kind, data=data, label=label, num_devices=num_devices)
    try:
        (folder / DEVICES).mkdir(parents=True, exist_ok=True)
        for number, write in enumerate(parts, start=1):
            write(folder / DEVICES / f"device{number}{chosen.suffix}")
        test(folder / f"{TEST}{chosen.suffix}")
        write_atomically(folder / TASK, _task_text(chosen, columns).encode())
        write_atomically(folder / README, _readme_text(chosen, folder).encode())
    except OSError as error:
        raise SettingsError(f"{folder} cannot be written: {error.strerror}") from error
    except ImportError as error:
        raise SettingsError(
            f"pictures need Pillow: {error}", remedy="pip install 'headwater[examples]'"
        ) from error
    of_what = "your rows" if data is not None else "made-up data"
    console.print(
        f"{folder}: {TASK}, {README}, {of_what} of {counted(len(parts), 'device')} and a test",
        soft_wrap=True,
        markup=False,
    )
    for note in notes:
        print_text(note)
    console.print(f"  try it    {escape(_try_it(chosen, folder))}", soft_wrap=True)


Write = Callable[[Path], None]


def _contents(
    kind: str, *, data: Path | None, label: str | None, num_devices: int
) -> tuple[list[Write], Write, dict[str, Any], list[str]]:
    """Return the writers of each device's data and of the test, the columns, and notes."""
    if data is not None and kind == "series":
        return _own_series(data, label=label, num_devices=num_devices)
    if data is not None:
        table = table_of(data, label=label, is_regression=kind == "regression")
        own, test = made_up.dealt(list(table.rows), num_devices)
        _check_rows(data, [*own, test])
        return [_writer(rows) for rows in own], _writer(test), _columns(table), _notes(table)
    numbers = range(1, num_devices + 1)
    if kind == "images":
        pictures = [_pictures(number, made_up.NUM_PICTURES) for number in numbers]
        return pictures, _pictures(0, made_up.NUM_TEST_PICTURES), {}, []
    if kind == "text":
        texts = [_texts(number, made_up.NUM_SENTENCES) for number in numbers]
        return texts, _texts(0, made_up.NUM_TEST_SENTENCES), {}, []
    if kind == "series":
        return (
            [_writer(made_up.series(number)) for number in numbers],
            _writer(made_up.series(0, num_hours=made_up.NUM_TEST_HOURS)),
            {},
            [],
        )
    is_regression = kind == "regression"
    columns: dict[str, Any] = {}
    if is_regression:
        columns = {"LABEL": "spends", "CLASSES": (), "LABEL_RANGE": (0.0, 150.0)}
    return (
        [_writer(made_up.table(number, is_regression=is_regression)) for number in numbers],
        _writer(made_up.table(0, is_regression=is_regression, num_rows=made_up.NUM_TEST_ROWS)),
        columns,
        [],
    )


def _check_rows(data: Path, parts: Sequence[Sized]) -> None:
    """Check that each device and the test have a row.

    Raises:
        SettingsError: one has none.
    """
    if not all(map(len, parts)):
        raise SettingsError(
            f"{data} has {counted(sum(map(len, parts)), 'row')}, too few for "
            f"{counted(len(parts) - 1, 'device')} and a test",
            remedy="give more rows, or fewer --devices",
        )


def _own_series(
    data: Path, *, label: str | None, num_devices: int
) -> tuple[list[Write], Write, dict[str, Any], list[str]]:
    names, rows = read_rows(data)
    name = label or names[-1]
    if name not in names:
        raise SettingsError(
            f"{data} has no column {name!r}",
            remedy=f"--label one of: {', '.join(map(repr, names))}",
        )
    try:
        values = [float(row[name]) for row in rows if row[name]]
    except ValueError as error:
        raise SettingsError(f"{data}: not every {name!r} is a number: {error}") from error
    if len(values) < 2:
        raise SettingsError(f"{data} has no values in the column {name!r}")
    low, high = (float(f"{value:.{DIGITS}g}") for value in (min(values), max(values)))
    parts, test = made_up.cut(rows, num_devices)
    _check_rows(data, [*parts, test])
    columns = {"VALUE": name, "VALUE_RANGE": (low, high if high > low else low + 1.0)}
    return [_writer(part) for part in parts], _writer(test), columns, [RANGES_NOTE]


RANGES_NOTE = (
    "The ranges in the task are those of your file, and every device gets them with the task: put "
    "in what is known of each column anyway where they would tell of somebody."
)


def _columns(table: Table) -> dict[str, Any]:
    return {
        "NUMBERS": table.numbers,
        "CATEGORIES": table.categories,
        "LABEL": table.label,
        "CLASSES": table.classes,
        "LABEL_RANGE": table.label_range,
    }


def _notes(table: Table) -> list[str]:
    what = f"the class {table.label!r}, one of {len(table.classes)}"
    found = [
        f"It predicts {what if table.classes else f'the number {table.label!r}'} from "
        f"{counted(len(table.numbers), 'column')} of numbers and {len(table.categories)} of "
        "categories."
    ]
    if table.passed_over:
        why = "; ".join(f"{name}: {text}" for name, text in table.passed_over.items())
        found.append(f"Passed over: {why}.")
    if table.num_unlabelled:
        found.append(f"{counted(table.num_unlabelled, 'row')} without a label were left out.")
    return [*found, RANGES_NOTE]


def _writer(rows: made_up.Rows) -> Write:
    return lambda path: made_up.write_table(path, rows)


def _pictures(number: int, num_pictures: int) -> Write:
    return lambda path: made_up.write_pictures(path, number, num_pictures=num_pictures)


def _texts(number: int, num_sentences: int) -> Write:
    def write(path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        text = made_up.texts(number, num_sentences=num_sentences)
        (path / "reports.txt").write_text(text, encoding="utf-8")

    return write


def _task_text(kind: Kind, columns: Mapping[str, Any]) -> str:
    """Return the template with these columns in the place of its own."""
    text = (HOME / EXAMPLES / "new" / f"{kind.template}.py").read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    own, _, after = rest.partition(END)
    lines = own
    if "CLASSES" in columns:
        values = {"NUMBERS": None, "CATEGORIES": None, **columns}
        lines = "".join(_assignment(name, value, own) for name, value in values.items())
    elif columns:
        kept = [line for line in own.splitlines() if line.split(" ")[0] not in columns]
        lines = "".join(f"{name} = {value!r}\n" for name, value in columns.items())
        lines += "".join(f"{line}\n" for line in kept)
    return before + lines + after


def _assignment(name: str, value: Any, own: str) -> str:
    """Return a line that sets a column's name; None: the template's own lines."""
    start = own.index(f"\n{name}" if not own.startswith(name) else name)
    line = own[start:].lstrip("\n")
    if value is None:
        return line[: line.index("\n}\n") + 3]
    target = line.partition(" = ")[0]
    shown = pprint.pformat(value, width=92 - len(target), sort_dicts=False)
    return f"{target} = {shown}\n"


def _try_it(kind: Kind, folder: Path) -> str:
    data, place = in_shell(f"{folder / DEVICES}/*{kind.suffix}"), in_shell(folder / TASK)
    return f"headwater simulate --task {place}:{kind.name} --data {data} {OPTIMIZER}"


def _readme_text(kind: Kind, folder: Path) -> str:
    place = in_shell(folder / TASK)
    first = in_shell(f"{folder / DEVICES / 'device1'}{kind.suffix}")
    return f"""# {folder.name}

`{TASK}` says what is trained: the model, the examples and the loss. Each device has
{kind.data}; `{DEVICES}/` has some to try, and `{TEST}{kind.suffix}`
is what the server tests the model on.

Try it on this machine, each of these as a device:

    {_try_it(kind, folder)}

Then make it yours: in `{TASK}` change {kind.change}.
This checks the task on a device's own data, before anything is sent:

    headwater client check --task {place}:{kind.name} --data {first}

Train on real devices. The server has `{TASK}` and the test, each device `{TASK}` and its own data:

    headwater server --task {place}:{kind.name} --min-clients 3 {OPTIMIZER} --out runs/first
    headwater client --task {place}:{kind.name} --data {first} --server HOST:8500

On one machine leave `--server` out, and give each client its own `--name`. `headwater server init`
makes keys for devices that join over a network. `--secure-aggregation semi-honest` on both sides
hides each device's update from the server.
"""
