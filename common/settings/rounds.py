"""Settings of the rounds: the cohort, how long a round waits, secure aggregation, privacy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from headwater.common.settings.fields import (
    ALL,
    DEVICE,
    Branch,
    Bytes,
    Count,
    Delta,
    Epsilon,
    File,
    Labels,
    NoiseMultiplier,
    Part,
    Probability,
    Rate,
    Seconds,
    Unit,
    setting,
)

MIN_MEMBERS = 3
MIN_MASKED_FRACTION = 0.01
"""What a masked update sends at least: a coordinate then waits for about 100 rounds at most."""
PrivacyUnit = Literal["device", "example"]
"""Of a secure session: with two, each member could subtract its own update from the sum."""


class CohortSettings(Branch):
    """Which clients are invited, and how long a round waits."""

    min_clients: Count = setting(1, "fewest clients for a round to start and count", short=True)
    size: Count | None = setting(None, "clients invited per round; not set: all", "--cohort-size")
    devices: Labels | None = setting(
        None,
        "train with the devices of these labels alone: site=lab; with several labels a device has "
        "them all, with several values of one any of these (docs/operation.md)",
    )
    deadline_seconds: Seconds | None = setting(
        None, "a round ends then with the updates it has; not set: wait for all", "--deadline"
    )
    max_aborted_rounds: Count = setting(
        5,
        "aborted rounds in a row after which the run gives up; before each new try it waits, 0.5 s "
        "and then twice as long each time, up to 8 s",
        on="",
    )
    weighting: Literal["samples", "dataset"] = setting(
        "samples", "weight of an update; samples: its own; dataset: its client's examples"
    )
    invite_within_rounds: Count = setting(
        10,
        "a client too slow for the deadline, or late three times in a row, is still invited once "
        "in so many rounds",
        "--invite-within",
    )
    return_seconds: Seconds = setting(
        5.0,
        "how long, from the loss of its connection, a client may return to a round whose other "
        "clients are done; while any of them works it may return in any case",
        on="",
    )
    reconnect_seconds: Seconds = setting(
        60.0, "the same while the round has too few updates; and how long a stream may stall", on=""
    )


class StatisticsSettings(Branch):
    """Counts, means and histograms of all examples, before training (docs/task.md)."""

    is_on: bool = setting(
        False,
        "the first round computes no gradient: it measures all examples as the task's statistics "
        "and measured say, and the rounds after it give the task the result",
        "--statistics/--no-statistics",
    )
    max_examples: Count = setting(
        65_536,
        "examples that are measured of a device under masks or noise, which hide how many it has; "
        "noise for a whole device grows with it",
        "--statistics-examples",
        le=2**24,
    )


class DeviceTestSettings(Branch):
    """A run of one round that tests a model on the devices' examples (docs/task.md)."""

    model: File | None = setting(
        None,
        "the run trains nothing: its only round tests this model on the devices' own examples (a "
        "run's folder, its checkpoint, or a file of weights)",
        "--test-model",
    )
    compare_with: File | None = setting(
        None, "test another model on the same examples, and show both", "--compare-with"
    )
    fraction: float = setting(
        0.1,
        "share of a device's examples that is tested, the same as are held out by a run of this "
        "share; 1: all, for a model that was trained on none of them",
        "--test-fraction",
        gt=0,
        le=1,
    )
    held_out: Annotated[
        str,
        Field(pattern=r"^(random|last|group:[^\x00-\x1f\x7f]{1,64})$"),
        Unit("random|last|group:COL"),
    ] = setting("random", "which: as --held-out of the run that held them out", on="")
    max_examples: Count = setting(
        65_536,
        "examples of which a device that masks tests its share, as it does not tell how many it "
        "has",
        on="",
        le=2**24,
    )
    spread_devices: int = setting(
        20, "fewest devices of which the spread over devices is shown", on="", ge=10
    )

    @field_validator("compare_with")
    @classmethod
    def _check_compare_with(cls, path: Path | None, info: ValidationInfo) -> Path | None:
        if path is not None and info.data.get("model") is None:
            raise ValueError("--compare-with is for --test-model, which names the other model")
        return path


class AggregationSettings(Branch):
    """How plain updates are combined, and what a single one may do (docs/plain-rounds.md)."""

    rule: Literal["sum", "clipped", "trimmed-mean", "median", "krum"] = setting(
        "sum",
        "how updates become a gradient; all but sum withstand false updates, cost accuracy where "
        "devices' data differ, and need every single vector: they are refused with masks",
        "--aggregation",
    )
    attackers: float = setting(
        0.2, "share of a round's updates that trimmed-mean and krum withstand", ge=0, lt=0.5
    )
    norm_multiple: Rate = setting(
        100.0,
        "largest norm of an update, per unit of its weight, as a multiple of the largest median of "
        "a round so far",
    )
    beyond_norm: Literal["refuse", "clip", "keep"] = setting(
        "refuse",
        "what happens to a plain update of a larger norm; it is counted in any case",
    )


class CompressionSettings(Branch):
    """Fewer bytes for updates and models (docs/bytes.md)."""

    up: Literal[
        "off", "bfloat16", "int8", "int4", "int2", "int1", "top-k", "random-k", "low-rank"
    ] = setting(
        "off",
        "send updates in fewer bytes: rounded to 16, 8, 4, 2 or 1 bits, only the largest or random "
        "coordinates, or factors of matrices; what is not sent is kept and added to the device's "
        "next update",
        "--compress",
    )
    values: Literal["bfloat16", "int4", "int2", "int1"] = setting(
        "bfloat16", "how top-k and low-rank send their values", "--compress-values"
    )
    rank: Count = setting(
        4, "columns of a matrix's factor that low-rank sends", "--compress-rank", le=4096
    )
    fraction: Part = setting(
        0.1, "of the coordinates that top-k and random-k send", "--compress-fraction"
    )
    feedback: bool = setting(True, "keep what is not sent; without it, it is lost", on="")
    down: Literal["off", "bfloat16", "int8", "int4", "int2", "int1"] = setting(
        "off",
        "send the model as a rounded difference to the version that a device holds; what is lost "
        "comes with the next difference",
        "--compress-down",
    )
    history_bytes: Bytes = setting(
        256 << 20,
        "differences that the server stores, for devices that were away; an older version "
        "takes the model whole",
        on="",
    )

    @property
    def keeps(self) -> bool:
        """Whether devices keep what they did not send."""
        return self.up != "off" and self.feedback

    @property
    def is_sparse(self) -> bool:
        """Whether an update is a few coordinates, or factors, in the place of all coordinates."""
        return self.up in ("top-k", "random-k", "low-rank")


class AsynchronousSettings(Branch):
    """Rounds that wait for no device: a step whenever a buffer is full (docs/asynchronous.md)."""

    is_on: bool = setting(
        False,
        "take a step as soon as --buffer updates are in, whichever model each was computed at; "
        "no device waits for a slower one, and a late update still counts",
        "--asynchronous/--synchronous",
    )
    buffer: Count | None = setting(
        None,
        "updates per step of asynchronous rounds; not set: three quarters of the clients that have "
        "not been at work for longer than the last step",
        "--buffer",
    )
    max_staleness: int = setting(
        20,
        "refuse an update that was computed at a model more than so many steps ago",
        "--max-staleness",
        ge=0,
        le=2**31 - 1,
    )
    exponent: float = setting(
        0.5,
        "an update of staleness s counts (1 + s)^-EXPONENT times its weight; 0: all alike",
        "--staleness-exponent",
        ge=0,
        le=16,
    )
    overlap: bool = setting(
        False,
        "with --asynchronous: a device trains on its next plan while the update of the one before "
        "is sent, so that processor and link work at once; its model lacks one step more",
        "--overlap/--no-overlap",
    )
    offline_windows: int = setting(
        1,
        "windows that a device sums under one plan while it has no link, before it waits; on the "
        "server: the most that it takes in one update",
        "--offline-windows",
        on=ALL,
        ge=1,
        le=2**20,
    )


class SecureSettings(Branch):
    """Secure aggregation: the server sees the cohort's sum, and no single update."""

    aggregation: Literal["off", "semi-honest", "active"] = setting(
        "off",
        "hide single updates from the server; active: even from a server that cheats",
        "--secure-aggregation",
        on=ALL,
        short=True,
    )
    ring_bits: Literal[8, 16, 32] = setting(
        32,
        "bits of a masked coordinate; 16 halves the traffic and rounds coarser; 8, for sessions of "
        "few members, quarters it and rounds far coarser",
    )
    min_members: int = setting(
        MIN_MEMBERS,
        "fewest members of a secure session; all members but one, if they collude, see the last "
        "one's update: with 3 members, two suffice, so set it as high as the fleet allows",
        on=ALL,
        ge=MIN_MEMBERS,
    )
    min_quota: int = setting(
        8, "fewest examples of a masked plan; a device answers no plan of fewer", on=ALL, ge=1
    )
    max_plans: int = setting(
        16, "masked plans in a row that a device trains on with the same examples", on="", ge=1
    )
    answer_factor: float = setting(
        1.25,
        "a masked device answers after this many times its plan's predicted time, whatever its "
        "data: room for a device that is slower than it measured; the rest is idle",
        on="",
        ge=1,
        le=100,
    )
    order_seed: int | None = setting(
        None,
        "order of this device's examples in masked rounds; not set: secret, and drawn once; 0: "
        "that of a plain round, as the simulator has it",
        on="",
        ge=0,
        le=2**53,
    )
    declared_examples: int | None = setting(
        None,
        "the number of examples that a masking device tells the server, for --weighting dataset; "
        "not set: none",
        on=DEVICE,
        ge=1,
        le=2**40,
    )
    min_survivors: Part = setting(
        0.7, "share of a session's members below which a device reveals nothing", on=""
    )
    max_share: Part = setting(
        0.6, "largest part of a session's planned weight that a device accepts for itself", on=""
    )
    member_bits: int = setting(
        4, "a device requires 2^this steps of the ring for each member", on="", ge=1, le=24
    )
    corrupted: Probability = setting(
        0.1, "share of devices assumed to collude; decides the graph of more than 64 members", on=""
    )
    dropout: Probability = setting(
        0.1, "share of devices assumed to drop out, in cohorts above 64", on=""
    )
    phase_seconds: Seconds = setting(
        20.0,
        "how long the server waits in each phase at most; once enough devices have answered, the "
        "others have ten times the median's time",
        on="",
    )
    identity: File | None = setting(
        None, "file of this device's signing identity (active)", on=f"{DEVICE} identity"
    )
    allow_list: File | None = setting(
        None,
        "file with a line NAME KEY for each identity that this device trusts (active); never get "
        "it from the server",
        on=DEVICE,
    )


class PrivacySettings(Branch):
    """Differential privacy of each device's whole part, or of each example (docs/privacy.md)."""

    epsilon: Epsilon | None = setting(
        None,
        "bound what all rounds reveal of any one device to this epsilon: clip updates and add "
        "noise; the server does it in plain rounds, the devices under masks",
        "--privacy-epsilon",
    )
    delta: Delta = setting(
        1e-5,
        "delta of the privacy; far below one over the number of devices",
        "--privacy-delta",
        on=ALL,
    )
    noise_multiplier: NoiseMultiplier | None = setting(
        None,
        "in place of an epsilon: the noise of a round's sum, in clip norms",
        "--privacy-noise-multiplier",
    )
    clip: Rate = setting(
        1.0,
        "L2 norm to which a device's mean gradient is clipped, or an example's; with "
        "--privacy-clip-quantile that of the first round",
        "--privacy-clip",
    )
    unit: PrivacyUnit = setting(
        "device",
        "what the epsilon is for: a device's whole part; or each of its examples, whose gradients "
        "are then clipped one by one, which takes longer",
        "--privacy-unit",
        on=ALL,
    )
    bands: int = setting(
        1,
        "correlate the noise over so many rounds: later rounds take part of it back, and a device "
        "takes part at most once in so many; at most devices / --cohort-size; 1: independent noise",
        "--privacy-bands",
        ge=1,
        le=1024,
    )
    clip_quantile: float | None = setting(
        None,
        "the clip norm follows this quantile of the devices' norms, which they tell under noise; "
        "0.5: the median; not set: it is fixed",
        "--privacy-clip-quantile",
        gt=0,
        lt=1,
    )
    budget: Epsilon | None = setting(
        None,
        "the most that this device spends over all its runs, for its --privacy-unit; it refuses "
        "rounds without noise",
        "--privacy-budget",
        on=DEVICE,
    )
    new_budget: bool = setting(
        False,
        "the owner's word that nothing was spent on this device's data, where the file that says "
        "so is lost; without it the device does not start",
        "--new-privacy-budget/--no-new-privacy-budget",
        on=DEVICE,
    )

    @field_validator("clip_quantile")
    @classmethod
    def _check_quantile(cls, quantile: float | None, info: ValidationInfo) -> float | None:
        noise = (info.data.get("epsilon"), info.data.get("noise_multiplier"))
        if quantile is not None and noise == (None, None):
            raise ValueError("nothing is clipped without noise: set an epsilon or a multiplier")
        return quantile

    @property
    def is_on(self) -> bool:
        """Whether the run's rounds have noise."""
        return self.epsilon is not None or self.noise_multiplier is not None
