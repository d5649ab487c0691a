"""The ways that ``benchmarks.privacy`` compares; each returns the test accuracy after the rounds.

* ``simulated``: the whole system in the simulator; in plain rounds the server adds the noise, under
  masks the devices do.
* ``shares``: what the devices and the server of masked rounds do, without the masks themselves,
  which cancel to the bit: clip, encode, add a share of noise in the ring, add modulo 2^32, decode,
  divide. A masked round of 1,000 devices takes half a minute, this half a second. ``twin`` is
  the same run in float64: the integers that the shares drew are added to the sum of the clipped
  vectors. The two differ by the ring's rounding alone.
* ``bare``: PyTorch, and ``torch.normal`` for the noise.
* ``pfl``: Apple's simulator with its central Gaussian mechanism.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

import headwater
from benchmarks.private_work import DELTA, TASKS, Choice, Perceptron, each_of
from headwater.client.secagg.noise_share import add_noise
from headwater.common.privacy.clipping import clip_to_norm
from headwater.common.privacy.noise_shares import (
    check_room,
    num_noisy,
    opened_multiplier,
    private_clip,
    share_sigma,
)
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.fixed_point import decode, decode_mean, encode_in_place, plan_encoding
from headwater.server.privacy.accountant import (
    Accountant,
    largest_rho,
    multiplier_of_rest,
)

MIN_SURVIVORS, CORRUPTED = 0.7, 0.1
"""The defaults of ``secure.min_survivors`` and ``secure.corrupted``."""
VECTORS_AT_ONCE = 100
OPTIMIZERS: dict[str, Any] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


@dataclass(frozen=True, kw_only=True)
class Work:
    """A model on a fleet, and the settings of its rounds."""

    model: str
    num_devices: int
    choice: Choice

    @property
    def task(self) -> Perceptron:
        return TASKS[self.model](each_of(self.num_devices))


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """The test accuracy, and the epsilon that was spent (None without noise)."""

    accuracy: float
    epsilon: float | None = None


def central_multiplier(epsilon: float | None, rounds: int) -> float:
    """Return the noise multiplier of so many sums with this epsilon together; 0 for no noise."""
    if epsilon is None:
        return 0.0
    return multiplier_of_rest(largest_rho(epsilon, delta=DELTA), [], rounds=rounds)


def simulated(work: Work, epsilon: float | None, *, seed: int, is_masked: bool) -> Result:
    """Run the whole system."""
    chosen, task = work.choice, work.task
    noise = {"privacy.epsilon": epsilon, "privacy.delta": DELTA, "privacy.clip": chosen.clip}
    with tempfile.TemporaryDirectory() as folder:
        fleet = Path(folder) / "fleet.toml"
        fleet.write_text(f'[[device]]\nprofile = "laptop"\ncount = {work.num_devices}\n')
        run = headwater.simulate(
            task,
            fleet=fleet,
            rounds=chosen.rounds,
            seed=seed,
            threads=1,
            optimizer=chosen.optimizer,
            learning_rate=chosen.learning_rate,
            accumulation_steps=1,
            micro_batch_size=task.each,
            secure_aggregation="semi-honest" if is_masked else "off",
            settings={
                "evaluation.every_rounds": chosen.rounds,
                "check_task": False,
                **({} if epsilon is None else noise),
            },
        )
    last = run.history[-1]
    return Result(accuracy=last.metrics["test_accuracy"], epsilon=last.epsilon)


@dataclass(frozen=True, kw_only=True, slots=True)
class RingSum:
    """An opened sum: the mean gradient [P], and the noise [P] that its sum has."""

    mean: Tensor
    noise: Tensor
    opened_multiplier: float


class Fleet:
    """A work's devices and global model, in bare PyTorch."""

    def __init__(self, work: Work, *, seed: int) -> None:
        self.work = work
        self._task = task = work.task
        torch.manual_seed(seed)
        self.model = task.new_model()
        self._names = [name for name, _ in self.model.named_parameters()]
        parts = [
            task.train_examples(data=None, part=part, num_parts=work.num_devices).tensors
            for part in range(work.num_devices)
        ]
        self._images, self._labels = (torch.stack(column) for column in zip(*parts, strict=True))
        kind = OPTIMIZERS[work.choice.optimizer]
        self._optimizer = kind(self.model.parameters(), lr=work.choice.learning_rate)
        self.num_values = sum(parameter.numel() for parameter in self.model.parameters())
        self.weight = work.num_devices * task.each
        self.norm_bound = work.choice.clip * task.each

    def vectors(self) -> Iterator[Tensor]:
        """Yield the devices' summed gradients, some [D, P] at a time."""

        def loss(parameters: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
            logits = torch.func.functional_call(self.model, parameters, (images,))
            return functional.cross_entropy(logits, labels, reduction="sum")

        of_each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))
        held = {name: value.detach() for name, value in self.model.named_parameters()}
        for start in range(0, len(self._labels), VECTORS_AT_ONCE):
            own = slice(start, start + VECTORS_AT_ONCE)
            rows = of_each(held, self._images[own], self._labels[own])
            yield torch.cat([rows[name].flatten(1) for name in self._names], 1)

    def clipped_sum(self, bound: float) -> Tensor:
        """Return the sum [P] of the vectors, each of a norm of at most the bound, in float64."""
        total = torch.zeros(self.num_values, dtype=torch.float64)
        for rows in self.vectors():
            factors = (bound / rows.norm(dim=1)).clamp(max=1.0)
            total += (rows * factors[:, None]).double().sum(0)
        return total

    def ring_sum(self, terms: PrivacyTerms) -> RingSum:
        """Return the sum of the clipped vectors and of all devices' shares, in the ring."""
        number, size = self.work.num_devices, self._task.each
        clip = private_clip(terms, [size] * number, self.num_values)
        encoding = plan_encoding(max_weight=self.weight, clip=clip)
        figures = {"scale_bits": encoding.scale_bits, "num_values": self.num_values}
        check_room(terms, encoding, num_values=self.num_values, num_members=number)
        sigma = share_sigma(terms, **figures, num_members=number)
        total = np.zeros(self.num_values, dtype=np.uint32)
        noise = np.zeros(self.num_values, dtype=np.uint32)
        for rows in self.vectors():
            for row in rows:
                clip_to_norm(row, terms.norm_bound)
                share = np.zeros(self.num_values, dtype=np.uint32)
                add_noise(share, sigma, os.urandom)
                total += encode_in_place(row, weight=size, encoding=encoding)[0]
                noise += share
        total += noise
        opened = opened_multiplier(terms, **figures, num_members=number, num_survivors=number)
        return RingSum(
            mean=torch.from_numpy(decode_mean(total, encoding=encoding, weight=self.weight)),
            noise=torch.from_numpy(decode(noise, encoding)),
            opened_multiplier=opened,
        )

    def step(self, mean: Tensor) -> None:
        """Take the optimizer's step along a mean gradient [P]."""
        for parameter in self.model.parameters():
            parameter.grad, mean = (
                mean[: parameter.numel()].view_as(parameter).float(),
                mean[parameter.numel() :],
            )
        self._optimizer.step()

    def accuracy(self) -> float:
        """Return the test accuracy."""
        images, labels = self._task.test_examples().tensors
        with torch.no_grad():
            return float((self.model(images).argmax(1) == labels).float().mean())


def bare(work: Work, epsilon: float | None, *, seed: int) -> Result:
    """Train with noise of the multiplier that the epsilon asks for, in each sum alike."""
    fleet, rounds = Fleet(work, seed=seed), work.choice.rounds
    multiplier = central_multiplier(epsilon, rounds)
    bound = fleet.norm_bound if multiplier else math.inf
    random = torch.Generator().manual_seed(int.from_bytes(os.urandom(7)))
    for _ in range(rounds):
        total = fleet.clipped_sum(bound)
        if multiplier:
            total += torch.normal(0.0, multiplier * bound, total.shape, generator=random)
        fleet.step(total / fleet.weight)
    return Result(accuracy=fleet.accuracy())


def shares(work: Work, epsilon: float, *, seed: int, is_same_noise: bool) -> tuple[Result, Result]:
    """Return the results of shares of noise in the ring, and of the twin in float64.

    With ``is_same_noise`` the sum of all shares has the noise that ``central_multiplier`` gives to
    a sum; otherwise the rounds spend the epsilon as a server plans it, with the default worst case.
    All devices survive.
    """
    rounds, number = work.choice.rounds, work.num_devices
    ring, twin = Fleet(work, seed=seed), Fleet(work, seed=seed)
    terms = PrivacyTerms(
        norm_bound=ring.norm_bound,
        noise_multiplier=1.0,
        min_survivors=MIN_SURVIVORS,
        corrupted=CORRUPTED,
    )
    all_honest = math.sqrt(num_noisy(terms, number) / number)
    even = central_multiplier(epsilon, rounds) * all_honest
    rho, events, gain = largest_rho(epsilon, delta=DELTA), list[tuple[float, int]](), 1.0
    for done in range(rounds):
        left = rounds - done
        chosen = even if is_same_noise else multiplier_of_rest(rho, events, rounds=left, gain=gain)
        opened = ring.ring_sum(terms.model_copy(update={"noise_multiplier": chosen}))
        ring.step(opened.mean)
        twin.step((twin.clipped_sum(twin.norm_bound) + opened.noise) / twin.weight)
        gain = (opened.opened_multiplier / chosen) ** 2
        events.append((opened.opened_multiplier, 1))
    spent = Accountant(DELTA, events).epsilon
    return Result(accuracy=ring.accuracy(), epsilon=spent), Result(accuracy=twin.accuracy())
