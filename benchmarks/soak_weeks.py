"""The weeks of ``benchmarks.soak_months`` as a table, and what grew in them without a limit."""

from __future__ import annotations

from benchmarks.measure import Figures

REAL = ("r0", "r1", "r2")
LOG_BYTES = 1 << 18
"""The size at which a file of rows or of events is rotated."""
MAY_GROW = {"rss_mb": 40.0, "descriptors": 4, "threads": 4, "disk_kb": 0}
"""What the last week may have more than the second one: two releases, an allocator's reserve."""
MOST_KB = (2 * 2 + 5) * LOG_BYTES // 1000 + 1000
"""Of a folder, which may grow so far: two files of rows and of tables, the events, and the
checkpoint with the models of the weeks."""


def table(weeks: list[Figures]) -> str:
    """Return the weeks as a table of Markdown; of the devices it shows the most that one holds."""
    whats = list(MAY_GROW)
    titles = ["week", "rounds", "updates", "refusals", "renewals"]
    titles += [f"{who}: {what}" for who in ("server", "device") for what in whats]
    lines = [titles, ["---"] * len(titles)]
    for week in weeks:
        refused = ", ".join(f"{number} {why}" for why, number in week["refused"].items()) or "none"
        held = week["held"]
        lines.append(
            [
                *(str(week.get(title, 0)) for title in titles[:3]),
                refused,
                str(week["renewals"]),
                *(str(held["server"][what]) if "server" in held else "-" for what in whats),
                *(str(max(held[one][what] for one in REAL if one in held)) for what in whats),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def grown(weeks: list[Figures], *, since: int = 1) -> list[str]:
    """Return what is more at the end than in an early week, beyond what a process may differ."""
    first, last = weeks[min(since, len(weeks) - 1)]["held"], weeks[-1]["held"]
    return [
        f"{name}: {what} {first[name][what]} -> {last[name][what]}"
        for name in last
        if name in first
        for what, most in MAY_GROW.items()
        if last[name][what] > first[name][what] + most
        and not (what == "disk_kb" and last[name][what] <= MOST_KB)
    ]
