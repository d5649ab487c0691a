"""Headwater: federated training for the computers that people already own.

The rooms lie at the top of the repository (``server/``, ``client/``, ``common/``, ``aggregator/``,
``simulation/``) and are imported from here alone, so that a user's own ``common.py`` or ``client/``
collides with nothing. In a checkout and for type checkers the folders beside this file are symbolic
links; a wheel has the folders themselves.

The public names are loaded at their first use, so that ``import headwater`` loads no torch. To add
one, name it three times: for type checkers, in ``__all__``, and in ``_MODULES``.
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headwater.client.adaptation.adapt import Adapted
    from headwater.client.adaptation.api import adapt
    from headwater.client.api import take_part
    from headwater.client.flower.gradient_sum import GradientSum
    from headwater.client.flower.model_difference import ModelDifference
    from headwater.client.own_feature.device_feature import DeviceFeature, DeviceWork
    from headwater.common.errors import HeadwaterError
    from headwater.common.evaluation.kinds import Calibration, ConfusionMatrix, RocHistogram
    from headwater.common.model.chunked_cross_entropy import chunked_cross_entropy
    from headwater.common.model.trained_model import load_model
    from headwater.common.statistics.columns import Statistics
    from headwater.common.statistics.kinds import Counts, Histogram, Moments
    from headwater.common.sums.encoded_vector import EncodedVector
    from headwater.common.sums.tensor_field import Values
    from headwater.common.task_of_parts.task_of_parts import Task
    from headwater.common.terms import SumOf, Terms
    from headwater.server.api import serve
    from headwater.server.evaluation_api import evaluate
    from headwater.server.flower.sum_of_gradients import SumOfGradients
    from headwater.server.own_feature.server_feature import ServerFeature
    from headwater.server.round_records import RoundRecords, load_rounds
    from headwater.server.run_result import Run
    from headwater.simulation.api import simulate
    from headwater.simulation.compare.api import Compared, compare

__all__ = [
    "Adapted",
    "Calibration",
    "Compared",
    "ConfusionMatrix",
    "Counts",
    "DeviceFeature",
    "DeviceWork",
    "EncodedVector",
    "GradientSum",
    "HeadwaterError",
    "Histogram",
    "ModelDifference",
    "Moments",
    "RocHistogram",
    "RoundRecords",
    "Run",
    "ServerFeature",
    "Statistics",
    "SumOf",
    "SumOfGradients",
    "Task",
    "Terms",
    "Values",
    "__version__",
    "adapt",
    "chunked_cross_entropy",
    "compare",
    "evaluate",
    "load_model",
    "load_rounds",
    "serve",
    "simulate",
    "take_part",
]

_MODULES = {
    "Adapted": "headwater.client.adaptation.adapt",
    "Calibration": "headwater.common.evaluation.kinds",
    "Compared": "headwater.simulation.compare.api",
    "ConfusionMatrix": "headwater.common.evaluation.kinds",
    "Counts": "headwater.common.statistics.kinds",
    "DeviceFeature": "headwater.client.own_feature.device_feature",
    "DeviceWork": "headwater.client.own_feature.device_feature",
    "EncodedVector": "headwater.common.sums.encoded_vector",
    "GradientSum": "headwater.client.flower.gradient_sum",
    "HeadwaterError": "headwater.common.errors",
    "Histogram": "headwater.common.statistics.kinds",
    "ModelDifference": "headwater.client.flower.model_difference",
    "Moments": "headwater.common.statistics.kinds",
    "RocHistogram": "headwater.common.evaluation.kinds",
    "RoundRecords": "headwater.server.round_records",
    "Run": "headwater.server.run_result",
    "ServerFeature": "headwater.server.own_feature.server_feature",
    "Statistics": "headwater.common.statistics.columns",
    "SumOf": "headwater.common.terms",
    "SumOfGradients": "headwater.server.flower.sum_of_gradients",
    "Task": "headwater.common.task_of_parts.task_of_parts",
    "Terms": "headwater.common.terms",
    "Values": "headwater.common.sums.tensor_field",
    "adapt": "headwater.client.adaptation.api",
    "chunked_cross_entropy": "headwater.common.model.chunked_cross_entropy",
    "compare": "headwater.simulation.compare.api",
    "evaluate": "headwater.server.evaluation_api",
    "load_model": "headwater.common.model.trained_model",
    "load_rounds": "headwater.server.round_records",
    "serve": "headwater.server.api",
    "simulate": "headwater.simulation.api",
    "take_part": "headwater.client.api",
}

# Flower's modules import each other in circles, which two threads must not begin at once.
_IMPORTING = RLock()
_HERE = Path(__file__).resolve().parent
if not (_HERE / "common").is_dir():
    # A Flower bundle, or a checkout on a file system without symbolic links: the rooms are beside.
    __path__.append(str(_HERE.parent))


def _version(beside: Path) -> str:
    """Return the version of the project file here, else of the installed package.

    A checkout and a Flower bundle have the file, and may differ from what is installed; a wheel has
    none, and what lies in site-packages may be another project's.
    """
    try:
        text = (beside / "pyproject.toml").read_text(encoding="utf-8")
    except OSError:
        text = ""
    if found := re.search(r'^name = "headwater"\nversion = "(.+)"$', text, re.MULTILINE):
        return found[1]
    from importlib.metadata import version  # slow

    return version("headwater")


__version__ = _version(_HERE.parent)

if not TYPE_CHECKING:  # for a type checker, every other name would exist and be of type Any

    def __dir__() -> list[str]:
        """Return the public names alone, which complete ``headwater.`` in a shell."""
        return sorted(__all__)

    def __getattr__(name: str) -> object:
        """Return a public name from its module (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with _IMPORTING:
            return getattr(import_module(_MODULES[name]), name)
