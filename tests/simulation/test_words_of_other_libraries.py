"""What users of Lightning, skorch or Flower would write trains, or is answered in a line."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import headwater
from headwater.common.errors import HeadwaterError
from headwater.common.settings.keywords import keyword_keys
from headwater.common.settings.suggestions import RENAMED
from headwater.common.task_of_parts.task_of_parts import PARTS

INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS[:, 0] > 0).long()
DATA = TensorDataset(INPUTS, TARGETS)
OF_CLIENTS = [Subset(DATA, range(10 * part, 10 * part + 10)) for part in range(4)]
NET = nn.Linear(4, 2)


class Table:
    """As a DataFrame of pandas."""

    iloc = ndim = shape = None


def run_with(**changes: Any) -> headwater.Run:
    """Train with changed arguments; one that is None is left out."""
    given: dict[str, Any] = {"model": NET, "examples": DATA, "loss": nn.CrossEntropyLoss()}
    given |= {"clients": 4, "rounds": 2, "progress": False} | changes
    return headwater.simulate(**{name: one for name, one in given.items() if one is not None})


def parameters(run: headwater.Run) -> list[Any]:
    return [tensor.tolist() for tensor in run.model.parameters()]


@pytest.mark.parametrize(
    "changes",
    [
        {"model": lambda: NET},
        {"examples": (INPUTS, TARGETS)},
        {"examples": (INPUTS.double().numpy(), TARGETS.numpy())},
        {"examples": (INPUTS.flip(0).numpy()[::-1], TARGETS.flip(0).numpy()[::-1])},
        {"loss": "cross_entropy"},
        {"loss": "CrossEntropyLoss"},
        {"loss": nn.functional.cross_entropy},
        {"metrics": ["accuracy"]},
        {"optimizer": "adam"},
        {"optimizer": torch.optim.Adam},
    ],
)
def test_another_form_of_the_same_trains_the_same_model(changes: dict[str, Any]) -> None:
    assert parameters(run_with(**changes)) == parameters(run_with())


def test_each_data_set_of_a_list_is_one_client_s() -> None:
    sizes = [4, 9, 27]
    ends = [sum(sizes[:at]) for at in range(4)]
    parts = [Subset(DATA, range(*pair)) for pair in pairwise(ends)]
    (row,) = run_with(examples=parts, clients=None, rounds=1).history
    assert [client.num_examples for client in row.clients] == sizes
    dealt = run_with(examples=parts, clients=2, partition="iid", rounds=1).history[0]
    assert sum(client.num_examples for client in dealt.clients) == 40


def test_arrays_are_tested_on() -> None:
    run = run_with(test=(INPUTS, TARGETS))
    assert run.evaluate((INPUTS, TARGETS)).metrics["accuracy"] == run.metrics["test_accuracy"]


OF_PARTS: list[tuple[dict[str, Any], str]] = [
    ({"examples": DataLoader(DATA)}, "examples=loader.dataset"),
    ({"examples": [DataLoader(one) for one in OF_CLIENTS]}, "loader.dataset for loader in"),
    ({"examples": OF_CLIENTS, "clients": 3}, "clients=4"),
    ({"examples": Table()}, "(table[INPUTS].to_numpy(), table[TARGET].to_numpy())"),
    ({"examples": (Table(), TARGETS)}, "(table[INPUTS].to_numpy(), table[TARGET].to_numpy())"),
    ({"examples": []}, "examples=(inputs, targets), or a data set"),
    ({"examples": {"a": DATA}}, "a list of data sets"),
    ({"examples": iter([])}, "arrays as in (X, y)"),
    ({"examples": INPUTS}, "arrays as in (X, y)"),
    ({"examples": (INPUTS, TARGETS[1:])}, "as many rows"),
    ({"test": DataLoader(DATA)}, "test=loader.dataset"),
    ({"test": 0.2}, "test_fraction=0.2"),
    ({"data": DATA}, "as examples="),
    ({"task": NET, "model": None}, "model=net"),
    ({"loss": "mse"}, "'mse_loss'"),
    ({"metrics": lambda outputs, targets: 0}, "metrics={'mine': FUNCTION}"),
    ({"optimizer": torch.optim.Adam(NET.parameters(), lr=0.5)}, "'Adam', learning_rate=0.5"),
    ({"optimizer": lambda parameters: None}, "optimizer='SGD'"),
]


@pytest.mark.parametrize(("changes", "meant"), OF_PARTS)
def test_what_cannot_be_taken_is_answered_by_what_to_write(
    changes: dict[str, Any], meant: str
) -> None:
    with pytest.raises(HeadwaterError) as refused:
        run_with(**changes)
    lines = [str(refused.value), *refused.value.__notes__]
    assert meant in lines[1]
    assert len(lines) == 2
    assert not any("\n" in line for line in lines)


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("num_clients", "it is clients here"),
        ("num_rounds", "it is rounds here"),
        ("train_dataset", "it is examples here"),
        ("criterion", "it is loss here"),
        ("callbacks", "it is observer here"),
        ("random_state", "it is seed here"),
        ("epochs", "local_epochs=N"),
        ("batch_size", "micro_batch_size=N"),
        ("device", "leave it out"),
        ("early_stopping", "stop_when='accuracy'"),
        ("momentum", "optimizer_argument={'momentum': VALUE}"),
        ("client_fn", "examples=[DATA_SET, ...]"),
        ("lr", "did you mean learning_rate?"),
    ],
)
def test_a_keyword_of_another_library_is_answered_by_ours(word: str, meant: str) -> None:
    with pytest.raises(TypeError, match=f"no keyword {word}") as refused:
        run_with(**{word: 1})
    assert meant in str(refused.value)
    assert "\n" not in str(refused.value)


def test_the_table_of_keywords_leads_to_keywords_only() -> None:
    ours = {*keyword_keys("simulate"), *PARTS, "observer", "progress"}
    assert RENAMED.keys() <= ours
    words = [word for those in RENAMED.values() for word in those.split()]
    assert not ours.intersection(words)
    assert len(words) == len({*words})


def test_parts_without_names_are_answered() -> None:
    with pytest.raises(TypeError, match="write the others by name, as in model=net"):
        headwater.simulate(NET, DATA, nn.CrossEntropyLoss())  # type: ignore[call-arg, arg-type]


@pytest.mark.parametrize(
    ("name", "meant"),
    [("predict", "run.model(inputs)"), ("save", "torch.save"), ("score", "run.evaluate(examples)")],
)
def test_a_method_of_another_library_s_result_is_answered(name: str, meant: str) -> None:
    with pytest.raises(AttributeError) as refused:
        getattr(run_with(rounds=1), name)
    assert meant in str(refused.value)
    assert not hasattr(run_with(rounds=1), "_repr_html_")
