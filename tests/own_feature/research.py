"""Published ideas as features, each as a user would write it: in one class of up to forty lines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

import headwater
from tests.own_feature.plain import gradient, put
from tests.python_tasks import Signs


class QFair:
    """q-FedSGD (Li et al. 2020, algorithm 1): clients with high losses count more."""

    class Terms(headwater.Terms):
        q: float
        lipschitz: float

        def sums(self, num_values: int) -> dict[str, headwater.SumOf]:
            return {"h": headwater.SumOf(length=1)}

    class Server(headwater.ServerFeature):
        def __init__(self, run: Any, q: float = 2.0, lipschitz: float = 2.0) -> None:
            super().__init__(run)
            self.asked = {"q": q, "lipschitz": lipschitz}

        def terms(self) -> Any:
            return self.Terms(**self.asked)

        def closed(self, done: Any, opened: Any) -> Any:
            return replace(done, mean_P=done.mean_P * done.weight / float(done.sums["h"]))

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            q, lipschitz, weight = self.terms.q, self.terms.lipschitz, work.total.weight
            loss, mean_P = work.total.loss_sum / weight, work.vector_P / weight
            steepness = q * loss ** (q - 1) * float(mean_P.square().sum())
            work.vector_P.mul_(loss**q / weight)
            self.sums = {"h": torch.tensor([steepness + lipschitz * loss**q])}


class FedDyn:
    """FedDyn (Acar et al. 2021): each client's objective is corrected by its last gradient."""

    class Terms(headwater.Terms):
        alpha: float

    class Server(headwater.ServerFeature):
        def __init__(self, run: Any, alpha: float = 0.5) -> None:
            super().__init__(run)
            self.alpha = alpha
            self.h_P = self.new_P = torch.zeros(run.image.layout.num_parameters)

        def terms(self) -> Any:
            return self.Terms(alpha=self.alpha)

        def closed(self, done: Any, opened: Any) -> Any:
            share = len(done.names) / self.run.population
            self.new_P = self.h_P + self.alpha * share * done.mean_P
            return replace(done, mean_P=done.mean_P + self.new_P / self.alpha)

        def committed(self, done: Any) -> None:
            self.h_P = self.new_P

        def tensors(self) -> Mapping[str, Tensor]:
            return {"h": self.h_P}

        def restore(self, row: Any, tensors: Mapping[str, Tensor]) -> None:
            self.h_P = tensors.get("h", self.h_P)

    class Device(headwater.DeviceFeature):
        def begin(self, work: headwater.DeviceWork) -> None:
            self.start_P = work.parameters_P
            self.last_P = self.state.get("gradient", torch.zeros_like(self.start_P))

        def direction(self, work: headwater.DeviceWork, mean_P: Tensor) -> None:
            mean_P += self.terms.alpha * (work.parameters_P - self.start_P) - self.last_P

        def end(self, work: headwater.DeviceWork) -> None:
            move_P = work.vector_P / work.total.weight
            self.state = {"gradient": self.last_P + self.terms.alpha * move_P}


class Agnostic:
    """Agnostic federated learning (Mohri et al. 2019): the worst mixture of the clients' losses."""

    class Terms(headwater.Terms):
        factor: float

        def shared_text(self) -> str:
            return ""

    class Server(headwater.ServerFeature):
        def __init__(self, run: Any, rate: float = 0.5) -> None:
            super().__init__(run)
            self.rate, self.shares, self.losses = rate, dict[str, float](), dict[str, float]()

        def terms(self) -> None:
            return None

        def open(self, opening: Any) -> None:
            self.shares = self.shares or dict.fromkeys(opening.plans, 1 / len(opening.plans))
            opening.plans = {
                name: plan.asking(self.Terms(factor=self.shares[name] * len(self.shares)))
                for name, plan in opening.plans.items()
            }

        def answered(self, opened: Any) -> None:
            self.losses = {one.name: one.loss_sum / one.weight for one in opened.accepted.values()}

        def committed(self, done: Any) -> None:
            names = sorted(self.shares)
            raised = torch.tensor([self.shares[n] + self.rate * self.losses[n] for n in names])
            self.shares = dict(zip(names, on_simplex(raised).tolist(), strict=True))

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            work.vector_P.mul_(self.terms.factor)


def on_simplex(values: Tensor) -> Tensor:
    """Return the nearest values that are no less than 0 and add up to 1."""
    falling = values.sort(descending=True).values
    over = (falling.cumsum(0) - 1) / torch.arange(1, len(values) + 1)
    return (values - over[int((falling > over).sum()) - 1]).clamp_min(0)


class Trust:
    """FLTrust (Cao et al. 2021): updates count by how they agree with the server's own gradient."""

    class Server(headwater.ServerFeature):
        def open(self, opening: Any) -> None:
            self.rows: list[Tensor] = []
            model = Signs().new_model()
            put(model, self.run.image.values_P.clone())
            self.own_P = gradient(model, root_batch())
            opening.held = self

        def hold(self, values_P: Tensor, weight: int) -> None:
            self.rows.append(values_P / weight)

        def held_mean(self, total: Any) -> tuple[Tensor, int]:
            rows = torch.stack(self.rows)
            trust = cosine_similarity(rows, self.own_P[None]).relu()[:, None]
            rows = rows * (self.own_P.norm() / rows.norm(dim=1, keepdim=True))
            return (trust * rows).sum(0) / trust.sum(), len(self.rows)


def root_batch() -> tuple[Tensor, Tensor]:
    """Return the server's own examples."""
    inputs, labels = Signs().train_examples(data=None, part=77, num_parts=1).tensors
    return inputs, labels


class Useful:
    """Oort (Lai et al. 2021): clients of high losses come first, slow ones later."""

    class Server(headwater.ServerFeature):
        def __init__(self, run: Any, seconds: float = 1.0, alpha: float = 2.0) -> None:
            super().__init__(run)
            self.seconds, self.alpha, self.uses = seconds, alpha, dict[str, float]()

        def turns(self, names: Any) -> Any:
            return sorted(names, key=lambda name: (-self.uses.get(name, torch.inf), name))

        def answered(self, opened: Any) -> None:
            for one in opened.accepted.values():
                haste = min(1.0, self.seconds / one.seconds) ** self.alpha
                self.uses[one.name] = haste * one.num_examples * one.loss_sum / one.weight


class Ditto:
    """Ditto (Li et al. 2021): beside the common model, each device keeps one of its own near it."""

    class Terms(headwater.Terms):
        pull: float
        rate: float

        def sums(self, num_values: int) -> dict[str, headwater.SumOf]:
            return {"own loss": headwater.SumOf(length=1, is_mean=True)}

    class Server(headwater.ServerFeature):
        def __init__(self, run: Any, pull: float = 0.5, rate: float = 0.1) -> None:
            super().__init__(run)
            self.asked, self.seen = {"pull": pull, "rate": rate}, list[float]()

        def terms(self) -> Any:
            return self.Terms(**self.asked)

        def committed(self, done: Any) -> None:
            self.seen.append(float(done.sums["own loss"]))

        def to_json(self) -> dict[str, Any]:
            return {"seen": self.seen}

    class Device(headwater.DeviceFeature):
        def begin(self, work: headwater.DeviceWork) -> None:
            start_P = work.parameters_P
            own_P = self.state.get("own", start_P).clone()
            for sum_P, weight in work.gradients(own_P):
                own_P -= self.terms.rate * (sum_P / weight + self.terms.pull * (own_P - start_P))
            self.state = {"own": own_P}
            self.loss = sum(loss for loss, _ in work.losses(own_P))

        def end(self, work: headwater.DeviceWork) -> None:
            self.sums = {"own loss": torch.tensor([self.loss])}


class Clusters:
    """IFCA (Ghosh et al. 2020): each device trains that of several models which fits it best."""

    class Terms(headwater.Terms):
        models: headwater.Values
        number: int

        @property
        def asks_model(self) -> bool:
            return False

        def sums(self, num_values: int) -> dict[str, headwater.SumOf]:
            return {
                "gradients": headwater.SumOf(length=self.number * num_values),
                "examples": headwater.SumOf(length=self.number),
            }

    class Server(headwater.ServerFeature):
        def __init__(self, run: Any, number: int = 2, rate: float = 0.5) -> None:
            super().__init__(run)
            first_P = run.image.values_P
            self.rate, self.models = rate, torch.stack([first_P * (-1) ** i for i in range(number)])

        def terms(self) -> Any:
            return self.Terms(models=self.models.flatten(), number=len(self.models))

        def committed(self, done: Any) -> None:
            counts = done.sums["examples"].clamp_min(1)[:, None]
            means = done.sums["gradients"].view_as(self.models) / counts
            self.models = (self.models - self.rate * means).float()

        def tensors(self) -> Mapping[str, Tensor]:
            return {"models": self.models}

        def restore(self, row: Any, tensors: Mapping[str, Tensor]) -> None:
            self.models = tensors.get("models", self.models)

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            models = self.terms.models.view(self.terms.number, -1)
            losses = [sum(loss for loss, _ in work.losses(one)) for one in models]
            best = losses.index(min(losses))
            sums, counts = torch.zeros_like(models), torch.zeros(len(models))
            for sum_P, weight in work.gradients(models[best]):
                sums[best] += sum_P
                counts[best] += weight
            self.sums = {"gradients": sums, "examples": counts}


class LowRank:
    """PowerSGD (Vogels et al. 2019) of rank 1: two rounds of questions make a step of two factors.

    For a model whose parameters are one matrix of ``rows``. What the factors miss stays on the
    device for the next step.
    """

    class Terms(headwater.Terms):
        rows: int
        left: headwater.Values
        right: headwater.Values
        asks_left: bool

        @property
        def asks_model(self) -> bool:
            return False

        def sums(self, num_values: int) -> dict[str, headwater.SumOf]:
            length = self.rows if self.asks_left else num_values // self.rows
            return {"factor": headwater.SumOf(length=length, is_mean=True)}

    class Server(headwater.ServerFeature):
        def __init__(self, run: Any, rows: int = 2) -> None:
            super().__init__(run)
            width = run.image.layout.num_parameters // rows
            self.rows, self.asks_left = rows, True
            self.left, self.right = torch.zeros(rows), torch.ones(width)

        def terms(self) -> Any:
            factors = {"left": self.left, "right": self.right}
            return self.Terms(rows=self.rows, asks_left=self.asks_left, **factors)

        def closed(self, done: Any, opened: Any) -> Any:
            if self.asks_left:
                return done
            step = torch.outer(self.left, done.sums["factor"].float())
            return replace(done, mean_P=step.flatten())

        def committed(self, done: Any) -> None:
            factor = done.sums["factor"].float()
            if self.asks_left:
                self.left = factor / factor.norm()
            else:
                self.right = factor
            self.asks_left = not self.asks_left

    class Device(headwater.DeviceFeature):
        def end(self, work: headwater.DeviceWork) -> None:
            asked, weight = self.terms, work.total.weight
            missed = self.state.get("missed", torch.zeros(asked.rows, len(asked.right)))
            if asked.asks_left:  # what the last step was is known by now
                missed = missed - torch.outer(asked.left, asked.right) * bool(self.state)
                sums = [sum_P for sum_P, _ in work.gradients(work.parameters_P)]
                matrix = torch.stack(sums).sum(0).view(asked.rows, -1) / weight + missed
                self.sums = {"factor": weight * matrix @ asked.right}
            else:
                matrix = missed
                self.sums = {"factor": weight * matrix.T @ asked.left}
            self.state = {"missed": matrix}


class Halved:
    """A learning rate of one's own: half of the schedule's as long as the loss rises."""

    class Server(headwater.ServerFeature):
        def __init__(self, run: Any) -> None:
            super().__init__(run)
            self.last, self.factors = torch.inf, list[float]()

        def rate_factor(self, done: Any) -> float:
            factor = 0.5 if done.loss > self.last else 1.0
            self.last = done.loss
            return factor


class OneMatrix(Signs):
    """A task whose parameters are one matrix."""

    def new_model(self) -> torch.nn.Module:
        return torch.nn.Linear(3, 2, bias=False)


def loss_of(model: torch.nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """Return the mean loss of a batch."""
    with torch.no_grad():
        return float(cross_entropy(model(batch[0]), batch[1]))
