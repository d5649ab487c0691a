"""A task of parts takes the very step that its user's loss takes in a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, TensorDataset

import headwater
from headwater.common.errors import HeadwaterError, TaskError
from headwater.common.task import loss_sum, max_weight_per_example, weight_unit
from headwater.common.task_of_parts.losses import OF_CLASSES, OF_ELEMENTS

N, CLASSES, TOKENS, IGNORED = 24, 4, 5, -100
WEIGHTS = torch.tensor([0.25, 1.0, 2.5, 0.7])
RATE = 0.5


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def labels(*shape: int, with_ignored: bool = False) -> Tensor:
    found = torch.randint(0, CLASSES, shape, generator=torch.Generator().manual_seed(1))
    if with_ignored:
        found[1::3] = IGNORED
    return found


def shares() -> Tensor:
    return functional.softmax(numbers(N, CLASSES), 1)


class PerToken(nn.Module):
    """Scores of each of some tokens, with the classes in the second place."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6, CLASSES * TOKENS)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.scores(inputs)
        return scores.view(-1, CLASSES, TOKENS)


def with_last(last: nn.Module, outputs: int = CLASSES) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(6, outputs), last)


SCORES, ONE, THREE = (with_last(nn.Identity(), number) for number in (CLASSES, 1, 3))
LOG_SHARES, CHANCES = with_last(nn.LogSoftmax(1)), with_last(nn.Sigmoid(), 3)
COINS = (numbers(N, 3) > 0).float()

Case = tuple[Callable[[], nn.Module], Any, Tensor]
CASES: dict[str, Case] = {
    "classes": (SCORES, nn.CrossEntropyLoss(), labels(N)),
    "class weights": (SCORES, nn.CrossEntropyLoss(weight=WEIGHTS), labels(N)),
    "bytes with class weights": (SCORES, nn.CrossEntropyLoss(weight=WEIGHTS), labels(N).byte()),
    "ignored": (SCORES, nn.CrossEntropyLoss(), labels(N, with_ignored=True)),
    "another ignored": (SCORES, nn.CrossEntropyLoss(ignore_index=2), labels(N)),
    "smoothed": (SCORES, nn.CrossEntropyLoss(label_smoothing=0.1), labels(N)),
    "all at once": (
        SCORES,
        nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.2),
        labels(N, with_ignored=True),
    ),
    "shares of classes": (SCORES, nn.CrossEntropyLoss(), shares()),
    "tokens": (PerToken, nn.CrossEntropyLoss(), labels(N, TOKENS, with_ignored=True)),
    "negative log": (LOG_SHARES, nn.NLLLoss(weight=WEIGHTS), labels(N)),
    "squares": (ONE, nn.MSELoss(), numbers(N, 1)),
    "squares of three": (THREE, nn.MSELoss(), numbers(N, 3)),
    "a sum": (THREE, nn.MSELoss(reduction="sum"), numbers(N, 3)),
    "absolute": (THREE, nn.L1Loss(), numbers(N, 3)),
    "smooth": (THREE, nn.SmoothL1Loss(beta=0.3), numbers(N, 3)),
    "Huber's": (THREE, nn.HuberLoss(delta=0.4), numbers(N, 3)),
    "chances": (CHANCES, nn.BCELoss(), COINS),
    "logits": (THREE, nn.BCEWithLogitsLoss(pos_weight=WEIGHTS[:3]), COINS),
    "counts": (THREE, nn.PoissonNLLLoss(full=True), numbers(N, 3).abs().round()),
    "margins": (THREE, nn.SoftMarginLoss(), COINS * 2 - 1),
    "divergence": (LOG_SHARES, nn.KLDivLoss(), shares()),
    "divergence of a batch": (LOG_SHARES, nn.KLDivLoss(reduction="batchmean"), shares()),
    "a function": (SCORES, functional.cross_entropy, labels(N)),
    "a class": (THREE, nn.MSELoss, numbers(N, 3)),
}


def test_each_loss_of_the_table_is_tried() -> None:
    tried = {type(loss) if isinstance(loss, nn.Module) else loss for _, loss, _ in CASES.values()}
    assert OF_ELEMENTS.keys() | OF_CLASSES.keys() <= tried


def as_users_call_it(loss: Any) -> Callable[[Tensor, Tensor], Tensor]:
    made = loss() if isinstance(loss, type) else loss
    if getattr(made, "reduction", "mean") == "sum":
        return lambda outputs, targets: made(outputs, targets) / outputs.numel()
    called: Callable[[Tensor, Tensor], Tensor] = made
    return called


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")
@pytest.mark.parametrize("name", CASES)
def test_sums_of_micro_batches_have_the_loss_and_gradient_of_the_mean(name: str) -> None:
    model_of, loss, targets = CASES[name]
    inputs = numbers(N, 6)
    model = model_of()
    task = headwater.Task(model=model, examples=TensorDataset(inputs, targets), loss=loss)
    central, summed = task.new_model(), task.new_model()
    mean = as_users_call_it(loss)(central(inputs), targets)
    torch.autograd.backward(mean)
    total, weight, most = 0.0, 0, 0.0
    for start, end in ((0, 5), (5, 6), (6, N)):
        part, own, _ = loss_sum(task, summed, [inputs[start:end], targets[start:end]])
        torch.autograd.backward(part)
        total, weight = total + part.item(), weight + own
        most = max(most, own / (end - start))
    assert most <= max_weight_per_example(task)
    rounding = 1e-4 if weight_unit(task) != 1 else 1e-6  # class weights are counted in 2^-16
    assert total / weight == pytest.approx(mean.item(), rel=rounding)
    for one, other in zip(summed.parameters(), central.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad / weight, other.grad, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("name", ["class weights", "ignored", "squares of three", "tokens"])
def test_a_round_of_unlike_clients_is_the_step_of_the_user_s_own_loss(name: str) -> None:
    model_of, loss, targets = CASES[name]
    inputs, model = numbers(N, 6), model_of()
    run = headwater.simulate(
        model=model,
        examples=TensorDataset(inputs, targets),
        loss=loss,
        clients=5,
        rounds=1,
        accumulation_steps=5,
        micro_batch_size=1,
        optimizer="sgd",
        learning_rate=RATE,
        progress=False,
    )
    mean = loss(model(inputs), targets)
    mean.backward()
    for found, own in zip(run.model.parameters(), model.parameters(), strict=True):
        assert own.grad is not None
        torch.testing.assert_close(found, own - RATE * own.grad, rtol=1e-4, atol=1e-6)
    assert run.history[0].loss == pytest.approx(mean.item(), rel=1e-4)


def test_five_lines_train_and_test_a_classifier() -> None:
    inputs = numbers(600, 10)
    wanted = (inputs[:, :3].sum(1) > 0).long()
    torch.manual_seed(0)  # else its weights hang on the tests before this one
    net = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 2))
    run = headwater.simulate(
        model=lambda: net,
        examples=TensorDataset(inputs[:500], wanted[:500]),
        test=TensorDataset(inputs[500:], wanted[500:]),
        loss=nn.CrossEntropyLoss(),
        clients=20,
        rounds=40,
        progress=False,
    )
    assert run.history[-1].metrics["test_accuracy"] > 0.9
    with torch.no_grad():
        right = (run.model(inputs[500:]).argmax(1) == wanted[500:]).float().mean().item()
    assert run.history[-1].metrics["test_accuracy"] == pytest.approx(right)
    assert run.evaluate().metrics == {"accuracy": pytest.approx(right)}
    trained = TensorDataset(inputs[:500], wanted[:500])
    mean = functional.cross_entropy(run.model(trained.tensors[0]), trained.tensors[1]).item()
    assert run.evaluate(trained).loss == pytest.approx(mean, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "asked", "expected"),
    [
        ("squares of three", ["mae", "mse"], {"mae", "mse"}),
        ("squares", None, {"mae"}),
        ("ignored", None, {"accuracy"}),
        ("another ignored", None, {"accuracy"}),
        ("class weights", None, {"weighted_accuracy"}),
        ("bytes with class weights", None, {"weighted_accuracy"}),
    ],
)
def test_metrics_are_what_they_say(name: str, asked: Any, expected: set[str]) -> None:
    model_of, loss, targets = CASES[name]
    inputs, model = numbers(N, 6), model_of()
    data = TensorDataset(inputs, targets)
    task = headwater.Task(model=model, examples=data, loss=loss, metrics=asked)
    _, weight, sums = loss_sum(task, model, [inputs, targets])
    assert sums.keys() == expected
    with torch.no_grad():
        outputs = model(inputs)
    counts = targets != getattr(loss, "ignore_index", IGNORED)
    right: dict[str, Callable[[], Tensor]] = {
        "mae": lambda: (outputs - targets).abs().mean(),
        "mse": lambda: (outputs - targets).square().mean(),
        "accuracy": lambda: (outputs.argmax(1) == targets)[counts].sum() / counts.sum(),
        "weighted_accuracy": lambda: (
            ((outputs.argmax(1) == targets) * WEIGHTS[targets.long()]).sum()
            / WEIGHTS[targets.long()].sum()
        ),
    }
    for metric, total in sums.items():
        assert total / weight == pytest.approx(right[metric]().item(), rel=1e-4)


def test_a_metric_of_the_user_s_own_is_a_sum() -> None:
    model_of, loss, targets = CASES["classes"]
    own = {"threes": lambda outputs, targets: (targets == 3).sum()}
    data = TensorDataset(numbers(N, 6), targets)
    task = headwater.Task(model=model_of, examples=data, loss=loss, metrics=own)
    _, _, sums = loss_sum(task, task.new_model(), [*data.tensors])
    assert sums == {"threes": float((targets == 3).sum())}


def arrays(number: int) -> tuple[Tensor, Tensor]:
    return numbers(number, 6), labels(number)


def test_sequences_are_examples_where_there_are_more_of_them_than_clients() -> None:
    data = [(numbers(TOKENS, 6), numbers(TOKENS, 1)) for _ in range(N)]
    run = headwater.simulate(
        model=lambda: nn.Linear(6, 1), examples=data, loss=nn.MSELoss(), clients=3, rounds=1
    )
    assert run.history[0].num_examples == N


class Tagged(Dataset[Any]):
    """Sentences with a tag for each token, as arrays of numpy's."""

    def __init__(self) -> None:
        self.inputs, self.tags = numbers(N, 6).numpy(), labels(N, TOKENS).numpy()

    def __len__(self) -> int:
        return N

    def __getitem__(self, at: int) -> Any:
        return self.inputs[at], self.tags[at]


def test_tags_as_arrays_are_as_tags_as_tensors() -> None:
    data = Tagged()
    whole = TensorDataset(torch.from_numpy(data.inputs), torch.from_numpy(data.tags))
    runs = [
        headwater.simulate(
            model=PerToken, examples=one, loss=nn.CrossEntropyLoss(), clients=3, rounds=2
        )
        for one in (data, whole)
    ]
    assert [row.loss for row in runs[0].history] == [row.loss for row in runs[1].history]
    assert runs[0].history[0].weight == N * TOKENS


CLASSES_OF_ALL = TensorDataset(numbers(N, 6), labels(N))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"loss": nn.TripletMarginLoss()}, "TripletMarginLoss"),
        ({"loss": lambda outputs, targets: outputs.sum()}, "<lambda>"),
        ({"metrics": "r2"}, "there is accuracy"),
        ({"model": 3}, "model is a int"),
        ({"examples": 3}, "examples is a int"),
        ({"examples": [arrays(3), arrays(9)]}, "2 pairs of arrays of unlike lengths"),
        ({"examples": [arrays(4), arrays(4)]}, "2 pairs of arrays, and there are 3 clients"),
        ({"examples": [{"x": numbers(6), "y": 1}] * N}, "an example is a dict"),
        ({"examples": TensorDataset(numbers(N, 6), labels(N).float())}, "Float"),
        ({"loss": None}, "nor loss"),
        ({"task": "my_task.py:Mine"}, "beside it"),
    ],
)
def test_what_is_no_part_is_refused_by_name(changed: dict[str, Any], said: str) -> None:
    parts = {"model": SCORES, "examples": CLASSES_OF_ALL, "loss": nn.CrossEntropyLoss()}
    with pytest.raises(TaskError) as found:
        headwater.simulate(**{**parts, **changed}, clients=3, rounds=1)
    assert said in str(found.value)
    assert found.value.remedy


@pytest.mark.parametrize("kind", [torch.float32, torch.int32, torch.int8, torch.bool])
def test_labels_of_another_type_are_answered_with_what_to_write(kind: torch.dtype) -> None:
    data = TensorDataset(numbers(N, 6), (labels(N) % 2).to(kind))
    with pytest.raises(TaskError) as found:
        headwater.simulate(
            model=SCORES, examples=data, loss=nn.CrossEntropyLoss(), clients=3, rounds=1
        )
    assert "classes as int64 (tensor.long())" in found.value.remedy


def test_an_example_weighs_its_points_where_targets_are_shares() -> None:
    """Of each class at each point, as soft labels of a picture are."""
    points = torch.softmax(numbers(N, 3, 2, 2), 1)
    data = TensorDataset(numbers(N, 4, 2, 2), points)
    task = headwater.Task(
        model=lambda: nn.Conv2d(4, 3, 1), examples=data, loss=nn.CrossEntropyLoss()
    )
    assert task.max_weight_per_example == 4
    run = headwater.simulate(task, clients=3, rounds=1, progress=False)
    assert run.history[0].weight == 4 * run.history[0].num_examples


def test_the_most_that_an_example_weighs_is_told_where_the_first_weighs_less() -> None:
    texts = [torch.arange(number) % CLASSES for number in (1, 4, 2, 5, 3, 5)]

    def padded(rows: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        return tuple(
            pad_sequence([row[at] for row in rows], batch_first=True, padding_value=value)
            for at, value in enumerate((0, IGNORED))
        )

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(CLASSES, CLASSES)

        def forward(self, words: Tensor) -> Tensor:
            scores: Tensor = self.table(words)
            return scores.transpose(1, 2)

    given: dict[str, Any] = {
        "model": Scores,
        "examples": [(text, text) for text in texts],
        "collate": padded,
        "loss": nn.CrossEntropyLoss(),
    }
    run = headwater.simulate(
        headwater.Task(**given, max_weight_per_example=5), clients=2, rounds=1, progress=False
    )
    assert run.history[0].weight == sum(map(len, texts))
    with pytest.raises(HeadwaterError, match="max_weight_per_example of 1"):
        headwater.simulate(headwater.Task(**given), clients=2, rounds=1, progress=False)


def test_a_hook_of_a_weight_acts_in_training() -> None:
    """A copy of the model would else train what the hook holds fast."""

    def held_row() -> nn.Linear:
        layer = nn.Linear(6, CLASSES)
        held = torch.arange(CLASSES)[:, None] == 0
        layer.weight.register_hook(lambda grad: grad * ~held)  # type: ignore[no-untyped-call]
        return layer

    data = TensorDataset(numbers(N, 6), labels(N))
    given: dict[str, Any] = {"examples": data, "loss": nn.CrossEntropyLoss(), "clients": 3}
    run = headwater.simulate(model=held_row, **given, rounds=2, learning_rate=0.1, progress=False)
    torch.manual_seed(0)
    moved = (run.model.state_dict()["weight"] - held_row().weight).abs().sum(1)
    assert (moved > 0).tolist() == [False, *[True] * (CLASSES - 1)]


def test_two_weights_in_one_memory_are_refused() -> None:
    def tied() -> nn.Module:
        first, second = nn.Linear(6, 6), nn.Linear(6, 6)
        second.weight.data = first.weight.data
        return nn.Sequential(first, second)

    with pytest.raises(HeadwaterError, match="two tensors in the same memory"):
        headwater.simulate(
            model=tied, examples=CLASSES_OF_ALL, loss=nn.CrossEntropyLoss(), clients=3, rounds=1
        )


def test_a_run_of_parts_goes_on_with_the_same_parts_and_says_so(tmp_path: Path) -> None:
    parts: dict[str, Any] = {
        "model": SCORES,
        "examples": CLASSES_OF_ALL,
        "loss": nn.CrossEntropyLoss(),
    }
    given: dict[str, Any] = {"out": tmp_path, "progress": False}
    headwater.simulate(**parts, **given, clients=3, rounds=1)
    with pytest.raises(HeadwaterError, match="an object of a Python program") as found:
        headwater.simulate(**given, resume=True, rounds=2)
    assert "model=, examples= and loss=" in found.value.remedy
    run = headwater.simulate(**parts, **given, resume=True, rounds=2)
    assert run.history[-1].round == 2


def test_outputs_of_another_shape_than_the_targets_are_not_stretched() -> None:
    data = TensorDataset(numbers(N, 6), numbers(N))
    with pytest.raises(HeadwaterError) as found:
        headwater.simulate(model=ONE, examples=data, loss=nn.MSELoss(), clients=3, rounds=1)
    assert "(1, 1)" in str(found.value) or "1)" in str(found.value)


def test_data_of_devices_are_opened_by_a_function_of_their_path(tmp_path: Path) -> None:
    def opened(data: Path | None) -> TensorDataset:
        assert data is not None
        return TensorDataset(*torch.load(data))

    for name in "ab":
        torch.save((numbers(N, 6), labels(N)), tmp_path / f"{name}.pt")
    run = headwater.simulate(
        model=SCORES,
        examples=opened,
        loss=nn.CrossEntropyLoss(),
        data=str(tmp_path / "*.pt"),
        rounds=2,
        progress=False,
    )
    assert [client.name for client in run.history[0].clients] == ["a", "b"]


def test_the_task_may_be_in_the_settings_or_in_the_run_that_goes_on(tmp_path: Path) -> None:
    given = {"task": "examples/digits.py:Digits", "simulation.clients": 3, "threads": 1}
    headwater.simulate(settings=given, rounds=1, out=tmp_path, progress=False)
    run = headwater.simulate(resume=True, rounds=2, out=tmp_path, progress=False)
    assert [row.round for row in run.history] == [1, 2]
    assert run.evaluate().num_examples > 0


MADE = """
import headwater
import torch
from torch import nn
from torch.utils.data import TensorDataset

data = TensorDataset(torch.zeros(8, 4), torch.zeros(8, 1))
mine = headwater.Task(model=nn.Linear(4, 1), examples=data, loss=nn.MSELoss())


class Mine(headwater.Task):
    def __init__(self) -> None:
        super().__init__(model=nn.Linear(4, 1), examples=data, loss=nn.MSELoss())
"""


@pytest.mark.parametrize("name", [":Mine", ":mine"])
def test_a_file_s_task_of_parts_is_a_class_or_an_object(tmp_path: Path, name: str) -> None:
    (tmp_path / "made.py").write_text(MADE)
    run = headwater.simulate(f"{tmp_path}/made.py{name}", clients=2, rounds=1, progress=False)
    assert isinstance(run.model, nn.Linear)


@pytest.mark.slow
def test_an_object_of_a_file_trains_under_masks_and_over_sockets(tmp_path: Path) -> None:
    """Each device loads it by the file's name, and they agree on its code."""
    (tmp_path / "made.py").write_text(MADE.partition("class Mine")[0])
    run = headwater.simulate(
        f"{tmp_path}/made.py",
        clients=3,
        rounds=1,
        progress=False,
        secure_aggregation="semi-honest",
        accumulation_steps=1,
        micro_batch_size=8,
        out=tmp_path / "run",
        settings={"simulation.engine": "grpc", "secure.min_members": 3},
    )
    assert run.history[0].num_clients == 3
    assert isinstance(headwater.load_model(tmp_path / "run", f"{tmp_path}/made.py:mine"), nn.Linear)
