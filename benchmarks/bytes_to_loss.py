"""Bytes to a loss: a small language model on six devices, whose texts are unlike each other.

A byte-level transformer of 0.18 M parameters is trained for 2,400 local steps on each device, H of
them a round, on texts that installed packages bring: Python code, its documentation, licences, C++
headers, tables of character sets, and stubs of types. ``float32_h30`` sends vectors and models
whole, with AdamW, the outer step and the local rate that were best of a few; the others take the
same ones, and as many tokens, in fewer bits and longer rounds. ``muon_...`` do the same with Muon.

``loss`` is the mean over seeds of the final loss on text that no device has, in nats a byte;
``bytes`` what was sent, up and down, as a share of float32's; ``over`` the loss over float32's, and
``over_muon`` over that of ``muon_float32_h30``, if it is among the ways.
"""

from __future__ import annotations

import json
import logging
import statistics
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.measure import Figures, argument_parser, report
from headwater.common.settings.sources import load
from headwater.examples.text_transformer import Block
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine

log = logging.getLogger(__name__)

CONTEXT, WIDTH, NUM_LAYERS, VOCABULARY = 64, 64, 3, 256
TEXT_BYTES, TEST_EXAMPLES = 400_000, 100
LOCAL_STEPS, BATCH_SIZE = 2400, 8
RATE, MUON_RATE = 8e-3, 16e-3  # at first; they fall as a cosine
SEEDS = (0, 1, 2)
NESTEROV: dict[str, Any] = {"learning_rate": 0.8, "momentum": 0.5, "nesterov": True}


@cache
def texts() -> list[bytes]:
    """Return six texts of different kinds, of equal length."""
    library, packages = Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parents[1]
    kinds = (
        (library, "*.py"),
        (library / "pydoc_data", "topics.py"),
        (packages, "*.dist-info/**/LICEN*E*"),
        (packages / "torch/include/ATen", "*.h"),
        (library / "encodings", "*.py"),
        (packages / "torch", "**/*.pyi"),
    )
    found = []
    for folder, pattern in kinds:
        text = bytearray()
        for path in sorted(folder.glob(pattern)):
            text += path.read_bytes() if path.is_file() and len(text) < TEXT_BYTES else b""
        assert len(text) >= TEXT_BYTES, f"{folder}/{pattern} has {len(text):,} bytes"
        found.append(bytes(text[:TEXT_BYTES]))
    return found


class Texts:
    """The bytes so far in, the next byte out; each device has one kind of text."""

    max_weight_per_example = CONTEXT

    def new_model(self) -> nn.Module:
        return Transformer()

    def train_examples(self, *, data: Path | None, part: int, num_parts: int) -> list[bytes]:
        return _windows(texts()[part])[TEST_EXAMPLES:]

    def test_examples(self) -> list[bytes]:
        return [window for text in texts() for window in _windows(text)[:TEST_EXAMPLES]]

    def collate(self, examples: Sequence[bytes]) -> Tensor:
        """Return bytes [B, T + 1]."""
        return torch.frombuffer(bytearray(b"".join(examples)), dtype=torch.uint8).view(
            len(examples), CONTEXT + 1
        )

    def loss_sum(self, model: nn.Module, bytes_BT: Tensor) -> tuple[Tensor, int, dict[str, float]]:
        logits_BTV = model(bytes_BT[:, :-1].long())
        targets = bytes_BT[:, 1:].long().flatten()
        loss = functional.cross_entropy(logits_BTV.flatten(0, 1), targets, reduction="sum")
        return loss, targets.numel(), {}


class Transformer(nn.Module):
    """The decoder of ``examples.text_transformer`` with a layer more."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        hidden_BTD = self.tokens(tokens_BT) + self.positions.weight[: tokens_BT.shape[1]]
        logits_BTV: Tensor = self.head(self.blocks(hidden_BTD))
        return logits_BTV


def _windows(text: bytes) -> list[bytes]:
    length = CONTEXT + 1
    # Neighbours are alike: the test takes windows from all over the text.
    cut = [text[start : start + length] for start in range(0, len(text) - length, length)]
    return cut[:: len(cut) // TEST_EXAMPLES][:TEST_EXAMPLES] + [
        window for at, window in enumerate(cut) if at % (len(cut) // TEST_EXAMPLES)
    ]


def rounds_of(
    steps: int,
    bits: str | None = None,
    *,
    rank: int | None = None,
    values: str = "bfloat16",
    masked: bool = False,
    muon: bool = False,
    **outer: float,
) -> dict[str, Any]:
    """Return the settings of rounds of H local steps, sent in few bits both ways.

    With a rank the updates are factors with values of ``values``; masked ones are in a ring of 8
    bits. Of both only the model is sent in the bits.
    """
    chosen = {"learning_rate": 1.0, "momentum": 0.3} | outer
    given: dict[str, Any] = {
        "local.steps": steps,
        "rounds": LOCAL_STEPS // steps,
        "optimizer.learning_rate": chosen.pop("learning_rate"),
        "optimizer.arguments": chosen,
    }
    sent: dict[str, Any] = {} if bits is None else {"compression.up": bits}
    sent |= {} if bits is None else {"compression.down": bits}
    if rank is not None:
        sent |= {"compression.up": "low-rank", "compression.rank": rank}
        sent |= {"compression.values": values}
    if masked:
        sent |= {
            "secure.aggregation": "semi-honest",
            "secure.ring_bits": 8,
            "compression.up": "off",
        }
        sent |= {"cohort.size": 6, "plan.accumulation_steps": 1, "local.batch_size": None}
    if muon:
        given |= {"local.optimizer": "muon", "local.learning_rate": MUON_RATE}
    return given | sent


FLOAT32, MUON = "float32_h30", "muon_float32_h30"
WAYS: dict[str, dict[str, Any]] = {
    FLOAT32: rounds_of(30),
    "averaging_h30": rounds_of(30, momentum=0.0),
    "diloco_h30": rounds_of(30, learning_rate=0.7, momentum=0.9, nesterov=True),
    "float32_h120": rounds_of(120),
    "int8_h30": rounds_of(30, "int8"),
    "int4_h30": rounds_of(30, "int4"),
    "int2_h30": rounds_of(30, "int2"),
    "int4_h60": rounds_of(60, "int4"),
    "int1_h30": rounds_of(30, "int1"),
    "int2_h60": rounds_of(60, "int2"),
    "int4_h120": rounds_of(120, "int4"),
    "int1_h60": rounds_of(60, "int1"),
    "int2_h120": rounds_of(120, "int2"),
    "rank16_h60": rounds_of(60, "int1", rank=16, values="int4"),
    "rank16_h120": rounds_of(120, "int1", rank=16, values="int4"),
    "masked_h120": rounds_of(120, "int2", masked=True),
    "masked_h240": rounds_of(240, "int1", masked=True),
    MUON: rounds_of(30, muon=True),
    "muon_int4_h30": rounds_of(30, "int4", muon=True),
    "muon_int4_h60": rounds_of(60, "int4", muon=True),
    "muon_int2_h60": rounds_of(60, "int2", muon=True),
    "muon_int2_h120": rounds_of(120, "int2", muon=True, **NESTEROV),
    "muon_float32_h120": rounds_of(120, muon=True),
    "muon_masked_h120": rounds_of(120, "int2", masked=True, muon=True, **NESTEROV),
}


def trained(way: dict[str, Any], *, seed: int) -> tuple[float, int]:
    """Return the final test loss of a run, and the bytes that it sent."""
    rows: list[RoundRow] = []
    given = {
        "task": "benchmarks.bytes_to_loss:Texts",
        "seed": seed,
        "threads": 1,
        "check_task": False,
        "simulation.clients": 6,
        "optimizer.name": "sgd",
        "local.algorithm": "fedavg",
        "local.batch_size": BATCH_SIZE,
        "local.optimizer": "adamw",
        "local.learning_rate": RATE,
        "local_schedule.name": "CosineAnnealingLR",
        "local_schedule.arguments": {"T_max": way["rounds"]},
        "plan.set_micro_batch_size": BATCH_SIZE,
        "evaluation.every_rounds": way["rounds"],
        "simulation.fleet": "equal",
    }
    chosen = {key: value for key, value in (given | way).items() if value is not None}
    run_engine(load(None, chosen), on_round=rows.append, resume=False)
    return rows[-1].metrics["test_loss"], sum(row.bytes_up + row.bytes_down for row in rows)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=WAYS, metavar="WAY")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    flags = parser.parse_args()
    first = [FLOAT32, *([MUON] if any(name.startswith("muon") for name in flags.ways) else [])]
    ways = {name: WAYS[name] for name in dict.fromkeys([*first, *flags.ways])}
    if flags.quick:
        ways = {name: way | {"rounds": 1, "local.steps": 2} for name, way in list(ways.items())[:2]}
    figures: Figures = {}
    for name, way in ways.items():
        found = [trained(way, seed=seed) for seed in flags.seeds[: 1 if flags.quick else None]]
        loss, sent = statistics.mean(loss for loss, _ in found), found[0][1]
        losses = [loss for loss, _ in found]
        figures[name] = {"loss": loss, "least": min(losses), "most": max(losses), "sent": sent}
        figures[name]["bytes"] = sent / figures[FLOAT32]["sent"]
        figures[name]["over"] = loss / figures[FLOAT32]["loss"] - 1
        if MUON in figures:
            figures[name]["over_muon"] = loss / figures[MUON]["loss"] - 1
        log.info("%s", json.dumps({name: figures[name]}))
        print(json.dumps({name: figures[name]}), flush=True)
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
