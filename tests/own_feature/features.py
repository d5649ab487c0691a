"""Features as users write them, and faults that they may have: each in one class."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

import headwater
from tests.python_tasks import Signs


class Pull:
    """FedProx (Li et al. 2020): each local step is pulled towards the server's model."""

    class Terms(headwater.Terms):
        mu: float

    class Server(headwater.ServerFeature):
        def __init__(self, run: Any, mu: float = 0.1) -> None:
            super().__init__(run)
            self.mu = mu

        def terms(self) -> headwater.Terms:
            found: headwater.Terms = self.Terms(mu=self.mu)
            return found

    class Device(headwater.DeviceFeature):
        def begin(self, work: headwater.DeviceWork) -> None:
            self.start_P = work.parameters_P.clone()

        def direction(self, work: headwater.DeviceWork, mean_P: Tensor) -> None:
            mean_P += self.terms.mu * (work.parameters_P - self.start_P)


class SecondPull(Pull):
    """Another one, of another strength."""

    NAME = "second"


class Histogram:
    """How many examples of each label the round's devices have used."""

    class Terms(headwater.Terms):
        def sums(self, num_values: int) -> dict[str, headwater.SumOf]:
            return {"labels": headwater.SumOf(length=2)}

    class Server(headwater.ServerFeature):
        def __init__(self, run: Any) -> None:
            super().__init__(run)
            self.seen: list[list[float]] = []

        def committed(self, done: Any) -> None:
            self.seen.append(done.sums["labels"].tolist())

        def to_json(self) -> dict[str, Any]:
            return {"seen": self.seen}

        def restore(self, row: Any, tensors: Any) -> None:
            self.seen = row.get("seen", [])

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            labels = [int(label) for _, label in work.examples()]
            self.sums = {"labels": torch.bincount(torch.tensor(labels), minlength=2)}


class LossesBefore(Histogram):
    """The sum of the losses of the model as it was sent, as q-FFL (Li et al. 2020) needs it."""

    NAME = "losses"

    class Terms(headwater.Terms):
        def sums(self, num_values: int) -> dict[str, headwater.SumOf]:
            return {"labels": headwater.SumOf(length=1, is_mean=True)}

    class Device(headwater.DeviceFeature):
        def begin(self, work: headwater.DeviceWork) -> None:
            self.before = sum(loss for loss, _ in work.losses())

        def end(self, work: headwater.DeviceWork) -> None:
            self.sums = {"labels": torch.tensor([self.before])}


class HighestLosses:
    """Power of choice (Cho et al. 2020): those whose last loss was the highest come first."""

    class Server(headwater.ServerFeature):
        def __init__(self, run: Any) -> None:
            super().__init__(run)
            self.losses: dict[str, float] = {}

        def turns(self, names: Any) -> Any:
            return sorted(names, key=lambda name: (-self.losses.get(name, torch.inf), name))

        def answered(self, opened: Any) -> None:
            reports = opened.accepted.values()
            self.losses |= {one.name: one.loss_sum / one.weight for one in reports}

        def to_json(self) -> dict[str, Any]:
            return {"losses": self.losses}

        def restore(self, row: Any, tensors: Any) -> None:
            self.losses = row.get("losses", {})


class GeometricMedian:
    """The geometric median of the updates (Pillutla et al. 2022), by Weiszfeld's steps."""

    class Server(headwater.ServerFeature):
        def open(self, opening: Any) -> None:
            self.rows: list[tuple[Tensor, int]] = []
            opening.held = self

        def hold(self, values_P: Tensor, weight: int) -> None:
            self.rows.append((values_P / weight, weight))

        def held_mean(self, total: Any) -> tuple[Tensor, int]:
            points = torch.stack([mean_P for mean_P, _ in self.rows]).double()
            weights = torch.tensor([weight for _, weight in self.rows]).double()
            median_P = (points * weights[:, None]).sum(0) / weights.sum()
            for _ in range(50):
                pull = weights / (points - median_P).norm(dim=1).clamp_min(1e-9)
                median_P = (points * pull[:, None]).sum(0) / pull.sum()
            return median_P.float(), int(weights.sum())


class StopsAtThree:
    """Ends a run by a rule of its own."""

    class Server(headwater.ServerFeature):
        def why_stopped(self) -> str | None:
            return "three rounds are enough" if self.run.round >= 3 else None


class WrongSums(Histogram):
    """Sends another length than its terms say."""

    NAME = "wrong"

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            self.sums = {"labels": torch.zeros(3)}


class Secagg:
    """Has a name that is taken."""

    NAME = "secagg"

    class Server(headwater.ServerFeature):
        pass


class Nothing:
    """Is no feature."""


class Ones:
    """One value that is 1 on each device: its mean is 1 however updates are weighed."""

    class Terms(headwater.Terms):
        def sums(self, num_values: int) -> dict[str, headwater.SumOf]:
            return {
                "mean": headwater.SumOf(length=1, is_mean=True),
                "number": headwater.SumOf(length=1),
            }

    class Server(Histogram.Server):
        def committed(self, done: Any) -> None:
            self.seen.append([float(done.sums["mean"]), float(done.sums["number"])])

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            weight = float(work.total.weight)
            self.sums = {"mean": torch.tensor([weight]), "number": torch.ones(1)}


class Counts:
    """Each device counts its rounds; some rounds ask nothing of it."""

    class Terms(headwater.Terms):
        def sums(self, num_values: int) -> dict[str, headwater.SumOf]:
            return {"rounds": headwater.SumOf(length=1)}

    class Server(Histogram.Server):
        def __init__(self, run: Any, every: int = 1) -> None:
            super().__init__(run)
            self.every = int(every)

        def terms(self) -> Any:
            return self.Terms() if self.run.round % self.every == 0 else None

        def committed(self, done: Any) -> None:
            self.seen.append([float(one) for one in done.sums.get("rounds", [])])

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            number = self.state.get("number", torch.zeros(1)) + 1
            self.state = {"number": number}
            self.sums = {"rounds": number}


class CountsByTwo(Counts):
    """Counts in steps of two, under the same name of a state."""

    NAME = "bytwo"

    class Terms(headwater.Terms):
        def sums(self, num_values: int) -> dict[str, headwater.SumOf]:
            return {"twos": headwater.SumOf(length=1)}

    class Server(Counts.Server):
        def committed(self, done: Any) -> None:
            self.seen.append([float(one) for one in done.sums["twos"]])

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            number = self.state.get("number", torch.zeros(1)) + 2
            self.state = {"number": number}
            self.sums = {"twos": number}


class Thirds(Counts):
    """Sums and a mean of numbers that a fixed point rounds."""

    NAME = "thirds"

    class Terms(headwater.Terms):
        def sums(self, num_values: int) -> dict[str, headwater.SumOf]:
            return {
                "rounds": headwater.SumOf(length=3, limit=100.0),
                "mean": headwater.SumOf(length=2, is_mean=True, scale_bits=40),
            }

    class Server(Counts.Server):
        def committed(self, done: Any) -> None:
            self.seen.append([*done.sums["rounds"].tolist(), *done.sums["mean"].tolist()])

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            third = (work.round + float(work.name)) / 3
            self.sums = {
                "rounds": torch.tensor([third, -third, 1e-12]),
                "mean": torch.tensor([third, -third / 7]),
            }


class OneClientAlone(Counts):
    """Asks one client alone."""

    NAME = "alone"

    class Server(Counts.Server):
        def terms(self) -> None:
            return None

        def open(self, opening: Any) -> None:
            if "1" in opening.plans:
                asked = opening.plans["1"].asking(self.Terms())
                opening.plans = {**opening.plans, "1": asked}


class Liar(Counts):
    """One device tells a value beyond the limit."""

    NAME = "liar"

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            self.sums = {"rounds": torch.tensor([3e38 if work.name == "0" else 1.0])}


class Robust(Counts):
    """Has the name of a feature that is built in."""


class StateOfText(Counts):
    """Keeps what is no tensor."""

    NAME = "text"

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            self.sums = {"rounds": torch.ones(1)}
            self.state = {"who": "me"}  # type: ignore[dict-item]


class Required(Counts):
    """Is the device owner's condition, and the server asks nothing of it."""

    NAME = "required"

    class Server(Counts.Server):
        def terms(self) -> None:
            return None

    class Device(headwater.DeviceFeature):
        is_required = True


class NothingUsable(Signs):
    """A task of which no example can be used."""

    def loss_sum(self, model: Any, batch: Any) -> Any:
        loss, weight, metrics = super().loss_sum(model, batch)
        return loss * torch.nan, weight, metrics


class Holds(GeometricMedian):
    """Holds updates where their sum alone is protected."""


class Turns(Pull):
    """Has a direction, in a run without local steps."""


class Misspelled(Counts):
    """Has a moment that nothing calls."""

    class Server(Counts.Server):
        def commited(self, done: Any) -> None:
            pass


class Sharp(Counts):
    """Sends a float64 table, which a wire flattens and rounds."""

    class Terms(headwater.Terms):
        def sums(self, num_values: int) -> dict[str, headwater.SumOf]:
            return {"rounds": headwater.SumOf(length=4, limit=2.0**25)}

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            self.sums = {"rounds": torch.full((2, 2), 16777217.0, dtype=torch.float64)}


class Spoils(Counts):
    """Changes what it was given: a copy, which no other client sees."""

    class Terms(Counts.Terms):
        numbers: list[float] = Field(default_factory=lambda: [0.0])

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            work.parameters_P.zero_()
            self.terms.numbers[0] += 1
            self.sums = {"rounds": torch.tensor([self.terms.numbers[0]])}


class Raises(Counts):
    """Raises on the server in round 2."""

    class Server(Counts.Server):
        def committed(self, done: Any) -> None:
            if self.run.round == 2:
                raise RuntimeError("not today")
            super().committed(done)


class TooLong(Counts):
    """Sends more with its plans than a message may have."""

    class Terms(Counts.Terms):
        numbers: list[float] = Field(default_factory=lambda: [0.5] * 300_000)


class TensorTooLong(Counts):
    """The same, as a tensor."""

    class Terms(Counts.Terms):
        numbers: headwater.Values = Field(default_factory=lambda: torch.zeros(200_000))


class SignCoding:
    """One bit for each coordinate, and one scale: the mean magnitude."""

    def __init__(self, *, terms: Any, **plan: Any) -> None:
        self.terms = terms

    def encode(self, values_P: Tensor, name: str) -> bytearray:
        bits = np.packbits(values_P.numpy() >= 0)
        return bytearray(np.float32(values_P.abs().mean()).tobytes() + bits.tobytes())

    def read(self, data: Any, name: str, num_values: int) -> headwater.EncodedVector:
        memory = memoryview(data)
        if len(memory) != 4 + -(-num_values // 8):
            raise headwater.HeadwaterError(f"{name}: no vector of signs")
        scale = float(np.frombuffer(memory[:4], np.float32)[0])
        signs = np.unpackbits(np.frombuffer(memory[4:], np.uint8), count=num_values)
        values = np.where(signs == 1, scale, -scale).astype(np.float32)
        return headwater.EncodedVector(num_values, lambda low, high: values[low:high])


class Signs1Bit:
    """signSGD with a scale (Karimireddy et al. 2019): 32 times fewer bytes."""

    class Terms(headwater.Terms):
        CODING = SignCoding

        def update_bytes(self, num_values: int) -> int:
            return 4 + -(-num_values // 8)

    class Server(headwater.ServerFeature):
        pass


class SecondCoding(Signs1Bit):
    """Another encoding."""

    NAME = "coded"


class Census(Histogram):
    """Counts labels, and trains nothing in the first two rounds."""

    class Terms(Histogram.Terms):
        trains: bool

        @property
        def asks_model(self) -> bool:
            return self.trains

    class Server(Histogram.Server):
        def terms(self) -> headwater.Terms:
            found: headwater.Terms = self.Terms(trains=self.run.round >= 2)
            return found
