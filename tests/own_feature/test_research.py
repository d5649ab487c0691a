"""Each published idea against a loop in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

import headwater
from headwater.server.rounds import checkpoint
from tests.own_feature import research
from tests.own_feature.plain import (
    CLIENTS,
    LOCAL,
    RATE,
    batches_of,
    gradient,
    initial,
    put,
    vector,
)
from tests.own_feature.research import OneMatrix, loss_of, on_simplex, root_batch
from tests.python_tasks import SIGNS, Signs

EXACT: dict[str, Any] = {
    "clients": CLIENTS,
    "accumulation_steps": 4,
    "micro_batch_size": 10,
    "optimizer": "sgd",
    "learning_rate": 1.0,
    "progress": False,
}


def whole(client: int, num_parts: int = CLIENTS) -> tuple[Tensor, Tensor]:
    inputs, labels = Signs().train_examples(data=None, part=client, num_parts=num_parts).tensors
    return inputs, labels


def saved_in(folder: Path) -> checkpoint.Saved:
    saved = checkpoint.load(folder)
    assert saved is not None
    return saved


def assert_close(run: Any, values_P: Tensor) -> None:
    torch.testing.assert_close(vector(run.model), values_P, rtol=5e-5, atol=5e-6)


def test_q_fedsgd() -> None:
    q, lipschitz = 2.0, 2.0
    run = headwater.simulate(Signs, **EXACT, rounds=3, feature=research.QFair)
    model, values_P = Signs().new_model(), vector(initial())
    for _ in range(3):
        put(model, values_P)
        moves, divisors = [], []
        for client in range(CLIENTS):
            mean_P, loss = gradient(model, whole(client)), loss_of(model, whole(client))
            moves.append(loss**q * mean_P)
            steepness = q * loss ** (q - 1) * float(mean_P.square().sum())
            divisors.append(steepness + lipschitz * loss**q)
        values_P = values_P - torch.stack(moves).sum(0) / sum(divisors)
    assert_close(run, values_P)


def feddyn(num_rounds: int, alpha: float) -> Tensor:
    model, server_P = Signs().new_model(), vector(initial())
    h_P = torch.zeros_like(server_P)
    last = [torch.zeros_like(server_P) for _ in range(CLIENTS)]
    for number in range(1, num_rounds + 1):
        ends = []
        for client in range(CLIENTS):
            put(model, server_P)
            for batch in batches_of(client, number):
                pull_P = alpha * (vector(model) - server_P)
                put(model, vector(model) - RATE * (gradient(model, batch) - last[client] + pull_P))
            ends.append(vector(model))
            last[client] = last[client] - alpha * (ends[-1] - server_P)
        h_P = h_P - alpha * torch.stack([end - server_P for end in ends]).mean(0)
        server_P = torch.stack(ends).mean(0) - h_P / alpha
    return server_P


def test_feddyn() -> None:
    given: dict[str, Any] = {**LOCAL, "feature": research.FedDyn}
    run = headwater.simulate(Signs, **given, rounds=3)
    assert_close(run, feddyn(3, 0.5))


def test_agnostic_federated_learning() -> None:
    run = headwater.simulate(Signs, **EXACT, rounds=4, feature=research.Agnostic)
    model, values_P = Signs().new_model(), vector(initial())
    shares = torch.full((CLIENTS,), 1 / CLIENTS)
    for _ in range(4):
        put(model, values_P)
        steps = [gradient(model, whole(client)) for client in range(CLIENTS)]
        losses = torch.tensor([loss_of(model, whole(client)) for client in range(CLIENTS)])
        values_P = values_P - sum(share * step for share, step in zip(shares, steps, strict=True))
        shares = on_simplex(shares + 0.5 * losses)
    assert_close(run, values_P)
    assert shares.max() - shares.min() > 0.01


@pytest.mark.parametrize(
    ("values", "expected"),
    [([0.2, 0.8], [0.2, 0.8]), ([1.0, 1.0], [0.5, 0.5]), ([2.0, 0.0, 0.0], [1.0, 0.0, 0.0])],
)
def test_the_nearest_mixture(values: Sequence[float], expected: Sequence[float]) -> None:
    assert on_simplex(torch.tensor(values)).tolist() == pytest.approx(expected)


def test_fltrust() -> None:
    run = headwater.simulate(Signs, **EXACT, rounds=3, feature=research.Trust)
    model, values_P = Signs().new_model(), vector(initial())
    for _ in range(3):
        put(model, values_P)
        own_P = gradient(model, root_batch())
        rows = torch.stack([gradient(model, whole(client)) for client in range(CLIENTS)])
        trust = cosine_similarity(rows, own_P[None]).clamp_min(0)
        scaled = rows / rows.norm(dim=1, keepdim=True) * own_P.norm()
        values_P = values_P - (trust[:, None] * scaled).sum(0) / trust.sum()
    assert_close(run, values_P)


def test_oort(tmp_path: Path) -> None:
    """Of clients with like losses the fast ones come first."""
    fleet = tmp_path / "fleet.toml"
    fleet.write_text(
        "".join(
            f"[[device]]\nexamples_per_second = {speed}\nmemory_bytes = 2_000_000_000\n"
            "upload_bytes_per_second = 1_000_000\ncount = 3\n"
            for speed in (5, 100)
        )
    )
    given: dict[str, Any] = {**EXACT, "clients": 6, "cohort_size": 3, "learning_rate": 0.01}
    run = headwater.simulate(
        Signs, **given, rounds=4, feature=research.Useful, settings={"simulation.fleet": str(fleet)}
    )
    invited = [{one.name for one in row.clients} for row in run.history]
    assert invited[:2] == [{"0", "1", "2"}, {"3", "4", "5"}]  # the unknown first
    seconds = {one.name: one.seconds for row in run.history[:2] for one in row.clients}
    assert invited[2] == invited[3] == set(sorted(seconds, key=lambda name: seconds[name])[:3])


def test_ditto(tmp_path: Path) -> None:
    run = headwater.simulate(Signs, **EXACT, rounds=3, feature=research.Ditto, out=tmp_path)
    model, values_P = Signs().new_model(), vector(initial())
    own: list[Tensor] = [values_P.clone() for _ in range(CLIENTS)]
    losses = []
    for number in range(1, 4):
        found = []
        for client in range(CLIENTS):
            for batch in batches_of(client, number):
                put(model, own[client])
                pull_P = 0.5 * (own[client] - values_P)
                own[client] = own[client] - 0.1 * (gradient(model, batch) + pull_P)
            put(model, own[client])
            found.append(loss_of(model, whole(client)))
        losses.append(sum(found) / CLIENTS)
        put(model, values_P)
        steps = [gradient(model, whole(client)) for client in range(CLIENTS)]
        values_P = values_P - torch.stack(steps).mean(0)
    assert_close(run, values_P)  # the common model is that of a run without the feature
    assert saved_in(tmp_path).progress.features["ditto"]["seen"] == pytest.approx(losses, rel=1e-5)


def test_ifca(tmp_path: Path) -> None:
    run = headwater.simulate(Signs, **EXACT, rounds=3, feature=research.Clusters, out=tmp_path)
    first_P, model = vector(initial()), Signs().new_model()
    models = [first_P, -first_P]
    for _ in range(3):
        chosen: list[list[Tensor]] = [[], []]
        for client in range(CLIENTS):
            losses = []
            for values_P in models:
                put(model, values_P)
                losses.append(loss_of(model, whole(client)))
            best = losses.index(min(losses))
            put(model, models[best])
            chosen[best].append(gradient(model, whole(client)))
        models = [
            values_P - 0.5 * torch.stack(steps).mean(0) if steps else values_P
            for values_P, steps in zip(models, chosen, strict=True)
        ]
    found = saved_in(tmp_path).features["clusters"]["models"]
    torch.testing.assert_close(found, torch.stack(models), rtol=5e-5, atol=5e-6)
    assert torch.equal(vector(run.model), first_P)


def test_powersgd() -> None:
    run = headwater.simulate(OneMatrix, **EXACT, rounds=6, feature=research.LowRank)
    model = OneMatrix().new_model()
    begun = headwater.simulate(OneMatrix, **EXACT | {"learning_rate": 1e-30}, rounds=1)
    values_P = vector(begun.model)
    missed, right = [torch.zeros(2, 3) for _ in range(CLIENTS)], torch.ones(3)
    for _ in range(3):
        put(model, values_P)
        matrices = [
            gradient(model, whole(client)).view(2, 3) + missed[client] for client in range(CLIENTS)
        ]
        left = torch.stack([matrix @ right for matrix in matrices]).mean(0)
        left = left / left.norm()
        right = torch.stack([matrix.T @ left for matrix in matrices]).mean(0)
        step = torch.outer(left, right)
        missed = [matrix - step for matrix in matrices]
        values_P = values_P - step.flatten()
    assert_close(run, values_P)


def test_a_learning_rate_of_one_s_own() -> None:
    given: dict[str, Any] = {**EXACT, "learning_rate": 200.0}
    run = headwater.simulate(Signs, **given, rounds=5, feature=research.Halved)
    model, values_P, last = Signs().new_model(), vector(initial()), float("inf")
    rates = []
    for _ in range(5):
        put(model, values_P)
        loss = sum(loss_of(model, whole(client)) for client in range(CLIENTS)) / CLIENTS
        rates.append(200.0 * (0.5 if loss > last else 1.0))
        steps = torch.stack([gradient(model, whole(client)) for client in range(CLIENTS)])
        values_P, last = values_P - rates[-1] * steps.mean(0), loss
    assert [row.learning_rate for row in run.history] == rates
    assert {100.0, 200.0} == set(rates)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedDyn", "Ditto", "Clusters", "LowRank"])
def test_they_have_the_same_bits_over_a_network(tmp_path: Path, name: str) -> None:
    here = Path(research.__file__)
    task = f"{here}:OneMatrix" if name == "LowRank" else SIGNS
    given = {**(LOCAL if name == "FedDyn" else EXACT), "feature": f"{here}:{name}"}
    found = []
    for engine in ("in-process", "grpc"):
        settings = {"simulation.engine": engine}
        out = tmp_path / engine
        headwater.simulate(task, **given, rounds=2, out=out, settings=settings)
        saved = saved_in(out)
        found.append((saved.image_U8.tolist(), saved.progress.features, saved.features))
    assert found[0][:2] == found[1][:2]
    for feature, tensors in found[0][2].items():
        for key, tensor in tensors.items():
            assert torch.equal(tensor, found[1][2][feature][key]), key


def test_gradients_elsewhere_leave_the_model_and_the_round_s_sum_as_they_are() -> None:
    """To the bit: the runs with and without Ditto's passes have the same common model."""
    with_it = headwater.simulate(Signs, **EXACT, rounds=2, feature=research.Ditto)
    without = headwater.simulate(Signs, **EXACT, rounds=2)
    assert torch.equal(vector(with_it.model), vector(without.model))
