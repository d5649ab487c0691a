"""Draws ``benchmarks.privacy``: accuracy against epsilon, a panel for each model and fleet."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measure import Figures

WAYS = {
    "central": ("noise of the server", "o", "black"),
    "bare": ("the same in bare PyTorch", "D", "tab:green"),
    "pfl": ("pfl, the same noise", "s", "tab:gray"),
    "same_noise": ("noise of the devices, the same in the sum", "^", "tab:blue"),
    "same_epsilon": ("noise of the devices, the same epsilon", "v", "tab:orange"),
}
"""The label, marker and colour of each way."""
EPSILONS = ("1", "2", "4", "8", "none")


def draw(parts: Figures, path: str | Path) -> None:
    """Draw mean and spread of each way at each epsilon; ``parts`` are by model and fleet."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4 * -(-len(parts) // 2)), layout="constrained")
    panels = figure.subplots(-(-len(parts) // 2), 2, sharey=True, squeeze=False).flat
    for axes, (name, by_epsilon) in zip(panels, sorted(parts.items()), strict=False):
        model, _, number = name.partition("-")
        axes.set_title(f"{model}, {int(number):,} devices", fontsize=10)
        for offset, (way, (label, marker, colour)) in enumerate(WAYS.items()):
            places, means, spreads = [], [], []
            for place, epsilon in enumerate(EPSILONS):
                found = by_epsilon.get(f"epsilon_{epsilon}", {}).get(way)
                if found is not None:
                    places.append(place + 0.1 * (offset - 2))
                    means.append(100 * found["mean"])
                    spreads.append(100 * (found["spread"] or 0.0))
            axes.errorbar(
                places, means, spreads, label=label, marker=marker, color=colour, linestyle="none"
            )
        axes.set_xticks(range(len(EPSILONS)), EPSILONS)
        axes.set_xlabel("epsilon of the run")
        axes.set_ylabel("test accuracy, %")
        axes.grid(axis="y", alpha=0.3)
    panels[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)
