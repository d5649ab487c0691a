"""How a setting is declared: its value's type and unit, its meaning, its flag and their heading."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from headwater.common.data.metric_direction import Direction, direction_of
from headwater.common.data.partition_spec import parse_rule
from headwater.common.settings.weekly_hours import weekly

# The commands that have a flag; a branch names them for its fields. `check` and `doctor` take every
# flag of the client, so that its command line can be examined as it is.
RUNS = "server simulate"
DEVICE = "client check doctor"
OWNER = "adapt predict"  # what an owner does with a released model
ALL = f"{RUNS} {DEVICE}"

# The headings of --help-all, in this order.
TASK = "Task"
DEVICE_PANEL = "This device"
SERVER = "The server"
SIMULATION = "Simulation"
TRAINING = "Training"
PLAN = "What each client computes"
RUN = "The run"
SECURE = "Secure aggregation (docs/secure-aggregation.md)"
PRIVACY = "Differential privacy (docs/privacy.md)"
TLS = "TLS (all three files on both sides, or none on loopback)"
PANELS = (TASK, DEVICE_PANEL, SERVER, SIMULATION, TRAINING, PLAN, RUN, SECURE, PRIVACY, TLS)


@dataclass(frozen=True, slots=True)
class Unit:
    """The word for a flag's value in --help: SECONDS, DIR, HOST:PORT."""

    name: str


def _check_hours(text: str) -> str:
    weekly(text)  # ValueError if the text holds no windows of the week
    return text


def _check_partition(text: str) -> str:
    parse_rule(text, examples_per_device=None, seed=0)  # ValueError if it is no partition
    return text


CRITERION = re.compile(r"(?:(min|max):)?([A-Za-z_][\w.@/-]*)")


def split_criterion(text: str) -> tuple[Direction | None, str]:
    """Return the direction, "min", "max" or None, and the metric of ``min:NAME`` or ``NAME``.

    Raises:
        ValueError: it has another form.
    """
    found = CRITERION.fullmatch(text)
    if found is None:
        raise ValueError("expected the name of a metric, or min:NAME, or max:NAME")
    given = found[1]
    return ("min" if given == "min" else "max") if given else None, found[2]


def direction(criterion: str) -> Direction:
    """Return the direction that a criterion gives, or that of its metric's name.

    Raises:
        ValueError: it gives none, and the name does not tell.
    """
    given, name = split_criterion(criterion)
    known = given or direction_of(name)
    if known is None:
        raise ValueError(
            f"whether lower or higher values of {name} are better is not known: write min:{name} "
            f"or max:{name}"
        )
    return known


def _check_criterion(text: str) -> str:
    direction(text)
    return text


PATTERNS, PAIRS, PLACES, KEYS = "PATTERNS", "NAME=VALUE", "FILE.py:CLASS,...", "KEY"
LABELS = "LABEL=VALUE"
"""The units of several patterns, names with values, places of code, public keys or labels, in one
text.

The flag may be repeated, and a file may have a list.
"""


def _joined_patterns(given: object) -> object:
    """Join a list of patterns by commas: one text fits a run config of plain values."""
    if isinstance(given, list | tuple) and all(isinstance(one, str) for one in given):
        given = ",".join(given)
    if not isinstance(given, str):
        return given
    joined = ",".join(part.strip() for part in given.split(",") if part.strip())
    if not joined:
        raise ValueError("expected a pattern of names, as in head.*")
    return joined


def _joined_places(given: object) -> object:
    """Join a list of places of code by commas."""
    if isinstance(given, list | tuple) and all(isinstance(one, str) for one in given):
        given = ",".join(given)
    if not isinstance(given, str):
        return given
    return ",".join(part.strip() for part in given.split(",") if part.strip()) or None


def pairs_of(joined: str | None) -> dict[str, str]:
    """Return the names and values of ``A=x,B=y``.

    Raises:
        ValueError: a name is not one of a class, or stands twice; or it has no value.
    """
    pairs: dict[str, str] = {}
    for part in [] if joined is None else joined.split(","):
        name, _, value = part.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w{0,99}", name) or not value or name in pairs:
            raise ValueError("expected the name of each class once, and its value, as in Texts=...")
        pairs[name] = value
    return pairs


def _check_pairs(text: str) -> str:
    if len(pairs_of(text)) > MAX_PAIRS:
        raise ValueError(f"expected at most {MAX_PAIRS} names")
    return text


LABEL_PATTERN = r"[\w.-]{1,40}=[\w.-]{1,40}"
MAX_LABELS = 500  # characters of all


def labels_of(joined: str) -> dict[str, set[str]]:
    """Return the values of each label in ``site=lab,kind=pi``.

    Raises:
        ValueError: it has another form.
    """
    found: dict[str, set[str]] = {}
    for part in joined.split(","):
        if not re.fullmatch(LABEL_PATTERN, part):
            raise ValueError(
                "expected labels as site=lab, each side up to 40 letters, digits, dots or dashes"
            )
        name, _, value = part.partition("=")
        found.setdefault(name, set()).add(value)
    return found


def has_labels(own: str | None, wanted: str) -> bool:
    """Return whether a device has each of the wanted labels, with one of its wanted values."""
    known = {} if own is None else labels_of(own)
    return all(known.get(name, set()) & values for name, values in labels_of(wanted).items())


def _check_labels(text: str) -> str:
    labels_of(text)
    return text


def checked_labels(text: str) -> str:
    """Return what a device's owner says of it, as site=lab,kind=pi.

    Raises:
        ValueError: it has another form, or a label twice.
    """
    twice = [name for name, values in labels_of(text).items() if len(values) > 1]
    if twice:
        raise ValueError(f"expected one value of each label, found several of {twice[0]}")
    return text


MAX_PAIRS = 50
BYTES = re.compile(r"(\d+(?:\.\d+)?) *([kMGT]i?)B", re.IGNORECASE)
PREFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
PREFIXES |= {f"{prefix}i": 2 ** (10 * n) for n, prefix in enumerate("kmgt", start=1)}


def _number_of_bytes(given: object) -> object:
    """Return the bytes of a text such as 4GB, 1.5 GB or 512MiB; anything else as it is."""
    found = BYTES.fullmatch(given.strip()) if isinstance(given, str) else None
    return given if found is None else int(Decimal(found[1]) * PREFIXES[found[2].lower()])


def _not_empty(given: object) -> object:
    """Refuse an empty text, which as a path is the working folder."""
    if given == "":
        raise ValueError("expected a path")
    return given


Scalar = bool | int | float | str
Count = Annotated[int, Field(ge=1, le=2**31 - 1), Unit("N")]
Threads = Annotated[int, Field(ge=1, le=1024), Unit("N")]
Rounds = Annotated[Count | Literal["forever"], Unit("N|forever")]
Steps = Annotated[int, Field(ge=1, le=4096), Unit("N")]
Bytes = Annotated[int, BeforeValidator(_number_of_bytes), Field(ge=1, le=2**53), Unit("BYTES")]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False), Unit("RATE")]
Part = Annotated[float, Field(gt=0, le=1), Unit("SHARE")]
Fraction = Annotated[float, Field(ge=0, le=1), Unit("SHARE")]
Probability = Annotated[float, Field(ge=0, lt=1), Unit("P")]
Epsilon = Annotated[float, Field(gt=0, le=1000), Unit("EPSILON")]
Delta = Annotated[float, Field(gt=0, lt=1), Unit("DELTA")]
NoiseMultiplier = Annotated[float, Field(ge=0.01, le=1e6), Unit("Z")]
WaitSeconds = Annotated[float, Field(ge=0, le=30 * 86_400, allow_inf_nan=False), Unit("SECONDS")]
"""Seconds that may be 0: no wait."""
Seconds = Annotated[float, Field(gt=0, le=30 * 86_400, allow_inf_nan=False), Unit("SECONDS")]
Address = Annotated[str, Unit("HOST:PORT")]
Addresses = Annotated[str, Unit("HOST:PORT[,...]")]
Name = Annotated[str, Unit("NAME")]
Folder = Annotated[Path, BeforeValidator(_not_empty), Unit("DIR")]
File = Annotated[Path, BeforeValidator(_not_empty), Unit("FILE")]
Kind = Annotated[str, AfterValidator(_check_partition), Unit("KIND")]
Patterns = Annotated[str, BeforeValidator(_joined_patterns), Field(max_length=1000), Unit(PATTERNS)]
Keys = Annotated[str, BeforeValidator(_joined_patterns), Field(max_length=1000), Unit(KEYS)]
Places = Annotated[str, BeforeValidator(_joined_places), Field(max_length=4000), Unit(PLACES)]
Pairs = Annotated[
    str,
    BeforeValidator(_joined_patterns),
    AfterValidator(_check_pairs),
    Field(max_length=10_000),
    Unit(PAIRS),
]
Labels = Annotated[
    str,
    BeforeValidator(_joined_patterns),
    AfterValidator(_check_labels),
    Field(max_length=MAX_LABELS),
    Unit(LABELS),
]
OwnLabels = Annotated[Labels, AfterValidator(checked_labels)]
Criterion = Annotated[str, AfterValidator(_check_criterion), Unit("METRIC")]
Hours = Annotated[str, AfterValidator(_check_hours), Unit("HH:MM-HH:MM")]


def setting(
    default: Any,
    meaning: str,
    flag: str | None = None,
    *,
    alias: str = "",
    on: str | None = None,
    panel: str | None = None,
    short: bool = False,
    bare: str | None = None,
    **limits: Any,
) -> Any:
    """Return a pydantic field that also describes its command-line flag.

    Args:
        default: the value if neither the file nor the command line sets one; None is "not set".
        meaning: what the setting does; shown by --help-all and docs/settings.md.
        flag: by default the key, as in ``--min-clients`` or ``--plain-text/--no-plain-text``.
        alias: a second, shorter name of the flag; "" for none.
        on: the commands that have the flag, by default the branch's; "" for no flag.
        panel: the heading of the flag in --help-all, by default the branch's.
        short: whether --help shows the flag too.
        bare: the value of the flag where none follows it; None: it needs one.
        limits: ge, gt, le and lt, as in pydantic.
    """
    extra: dict[str, Any] = {
        "flag": flag,
        "alias": alias,
        "on": on,
        "panel": panel,
        "short": short,
        "bare": bare,
    }
    return Field(default, description=meaning, json_schema_extra=extra, **limits)


def branch(settings: type[Branch], panel: str, *, on: str) -> Any:
    """Return the field of a branch: the heading of its flags, and the commands that have them."""
    return Field(default_factory=settings, json_schema_extra={"panel": panel, "on": on})


class Branch(BaseModel):
    """A branch of the tree: frozen; an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)
