"""Features of the user's, against plain PyTorch loops; the same on every way of running."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import cross_entropy

import headwater
from headwater.common.errors import SettingsError
from headwater.server.operations.round_log import read_rows
from headwater.server.rounds import checkpoint
from tests.own_feature import features
from tests.own_feature.plain import (
    CLIENTS,
    LOCAL,
    RATE,
    STEPS,
    batches_of,
    gradient,
    initial,
    put,
    vector,
)
from tests.python_tasks import SIGNS, Signs

HERE = Path(__file__).resolve().parent
ENGINES = ["in-process", pytest.param("grpc", marks=pytest.mark.slow)]
SCAFFOLD = str(HERE.parents[1] / "examples" / "extensions" / "scaffold.py") + ":Scaffold"


def named(name: str) -> str:
    return f"{HERE / 'features.py'}:{name}"


def scaffold_by_a_plain_loop(num_rounds: int) -> Tensor:
    """SCAFFOLD, algorithm 1 with option II, all clients in each round."""
    model = initial()
    server_P = vector(model)
    mean_variate = torch.zeros_like(server_P)
    variates = [torch.zeros_like(server_P) for _ in range(CLIENTS)]
    for number in range(1, num_rounds + 1):
        moves, changes = [], []
        for client in range(CLIENTS):
            put(model, server_P)
            for batch in batches_of(client, number):
                step = gradient(model, batch) + mean_variate - variates[client]
                put(model, vector(model) - RATE * step)
            move = server_P - vector(model)
            new = variates[client] - mean_variate + move / (STEPS * RATE)
            moves.append(move)
            changes.append(new - variates[client])
            variates[client] = new
        server_P = server_P - sum(moves) / CLIENTS
        mean_variate = mean_variate + sum(changes) / CLIENTS
    return server_P


def test_scaffold_is_that_of_a_plain_loop() -> None:
    run = headwater.simulate(Signs, **LOCAL, rounds=4, feature=SCAFFOLD)
    torch.testing.assert_close(vector(run.model), scaffold_by_a_plain_loop(4), rtol=2e-5, atol=2e-6)
    plain = headwater.simulate(Signs, **LOCAL, rounds=4)
    assert not torch.allclose(vector(run.model), vector(plain.model), atol=1e-4)


@pytest.mark.slow
def test_scaffold_is_the_same_over_a_network_and_after_a_resume(tmp_path: Path) -> None:
    given: dict[str, Any] = {**LOCAL, "feature": SCAFFOLD}
    models = []
    for name in ("in-process", "grpc"):
        engine = {"simulation.engine": name}
        headwater.simulate(SIGNS, **given, rounds=4, out=tmp_path / name, settings=engine)
        models.append(load_file(tmp_path / name / "model.safetensors"))
    headwater.simulate(SIGNS, **given, rounds=2, out=tmp_path / "resumed")
    headwater.simulate(SIGNS, **given, rounds=4, out=tmp_path / "resumed", resume=True)
    models.append(load_file(tmp_path / "resumed" / "model.safetensors"))
    for other in models[1:]:
        assert_same(models[0], other)


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_run_is_not_resumed_without_its_feature(tmp_path: Path) -> None:
    given: dict[str, Any] = {**LOCAL, "feature": SCAFFOLD}
    headwater.simulate(SIGNS, **given, rounds=1, out=tmp_path / "run")
    settings = tmp_path / "run" / "settings.toml"
    text = settings.read_text()
    assert text.count(SCAFFOLD) == 1
    settings.write_text("".join(line for line in text.splitlines(True) if SCAFFOLD not in line))
    with pytest.raises(SettingsError, match="scaffold"):
        headwater.simulate(SIGNS, **LOCAL, rounds=2, out=tmp_path / "run", resume=True)


def test_a_direction_of_one_s_own_is_the_built_in_one() -> None:
    """FedProx, which ``--algorithm fedprox`` has too."""
    mu = 0.3
    own = headwater.simulate(
        Signs,
        **LOCAL,
        rounds=3,
        feature=features.Pull,
        settings={"feature.arguments": {"mu": mu}},
    )
    built_in = headwater.simulate(
        Signs, **LOCAL, rounds=3, algorithm="fedprox", settings={"local.proximal": mu}
    )
    torch.testing.assert_close(vector(own.model), vector(built_in.model), rtol=1e-5, atol=1e-6)


def labels_seen(tmp_path: Path, feature: str = "Histogram", **more: Any) -> list[list[float]]:
    headwater.simulate(
        SIGNS,
        clients=4,
        rounds=3,
        feature=named(feature),
        out=tmp_path,
        progress=False,
        **more,
    )
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    found = [one["seen"] for one in saved.progress.features.values() if "seen" in one]
    seen: list[list[float]] = found[0]
    return seen


def test_a_loss_of_the_received_model_is_that_of_a_plain_loop(tmp_path: Path) -> None:
    given: dict[str, Any] = {"accumulation_steps": 4, "micro_batch_size": 10}
    given |= {"optimizer": "sgd", "learning_rate": 0.5}
    found = labels_seen(tmp_path, "LossesBefore", **given)
    model, values_P = Signs().new_model(), vector(initial())
    for number in range(3):
        put(model, values_P)
        losses, sums = [], []
        for part in range(4):
            inputs, labels = Signs().train_examples(data=None, part=part, num_parts=4).tensors
            losses.append(float(cross_entropy(model(inputs), labels, reduction="sum").detach()))
            sums.append(gradient(model, (inputs, labels)))
        assert found[number] == pytest.approx([sum(losses) / 160], rel=1e-5)
        values_P = values_P - 0.5 * torch.stack(sums).mean(0)


@pytest.mark.parametrize("settings", [{}, {"compression.up": "int8"}])
def test_a_sum_beside_the_model_s_is_exact_also_where_that_one_is_encoded(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    seen = labels_seen(tmp_path, accumulation_steps=4, micro_batch_size=10, settings=settings)
    labels = torch.cat(
        [Signs().train_examples(data=None, part=p, num_parts=4)[:][1] for p in range(4)]
    )
    assert seen == [torch.bincount(labels, minlength=2).tolist()] * 3


def test_a_sum_of_another_length_is_no_update_and_the_run_says_so() -> None:
    given: dict[str, Any] = {"settings": {"cohort.max_aborted_rounds": 1}}
    with pytest.raises(headwater.HeadwaterError) as found:
        headwater.simulate(
            Signs, clients=2, rounds=1, feature=features.WrongSums, progress=False, **given
        )
    assert "the sum labels has 3 values, the plan asks for 2" in str(found.value)


@pytest.mark.parametrize(
    "hidden",
    [
        {"privacy_epsilon": 5.0, "accumulation_steps": 4, "micro_batch_size": 8},
        {
            "privacy_epsilon": 5.0,
            "accumulation_steps": 4,
            "micro_batch_size": 8,
            "secure_aggregation": "semi-honest",
        },
    ],
)
def test_a_sum_without_noise_goes_with_no_privacy(hidden: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="beside the model's"):
        headwater.simulate(
            Signs, clients=5, rounds=1, feature=features.Histogram, progress=False, **hidden
        )


MASKED: dict[str, Any] = {"secure_aggregation": "semi-honest", "clients": 5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"simulation.engine": "in-process"},
        pytest.param({"simulation.engine": "grpc"}, marks=pytest.mark.slow),
        {"secure.ring_bits": 16},
        {"compression.up": "random-k", "compression.fraction": 0.5},
    ],
)
def test_a_masked_sum_beside_the_model_s_is_the_one_in_clear(
    tmp_path: Path, in_clear: list[list[float]], settings: dict[str, Any]
) -> None:
    assert seen_in(tmp_path / "masked", "Thirds", **MASKED, **FIXED, settings=settings) == in_clear
    assert in_clear[0][0] % 1  # it is no whole number, which any scale would hold


@pytest.fixture(scope="module")
def in_clear(tmp_path_factory: pytest.TempPathFactory) -> list[list[float]]:
    return seen_in(tmp_path_factory.mktemp("plain"), "Thirds", clients=5, **FIXED)


@pytest.mark.slow
def test_scaffold_under_masks_is_that_of_a_plain_loop() -> None:
    """Its variates are masked, so that nobody sees one device's."""
    given: dict[str, Any] = {**LOCAL, **MASKED, "rounds": 3, "feature": SCAFFOLD}
    masked = headwater.simulate(Signs, **given)
    plain = headwater.simulate(Signs, **given | {"secure_aggregation": "off"})
    torch.testing.assert_close(vector(masked.model), vector(plain.model), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_masked_means_are_right_in_asynchronous_rounds(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET.replace("count = 3", "count = 5"))
    settings = {
        "asynchronous.is_on": True,
        "asynchronous.buffer": 3,
        "simulation.fleet": str(tmp_path / "fleet.toml"),
    }
    seen = seen_in(tmp_path / "run", "Ones", **MASKED, settings=settings)
    assert [mean for mean, _ in seen] == [1.0] * 4
    assert all(number >= 3 for _, number in seen)


@pytest.mark.slow
def test_a_masked_value_beyond_its_limit_leaves_its_sender_out_unseen(tmp_path: Path) -> None:
    """It is masked as an update of weight 0: a refusal would tell the server of one device."""
    assert seen_in(tmp_path, "Liar", **MASKED) == [[4.0]] * 4
    assert read_rows(tmp_path)[0]["num_clients"] == 5


def test_a_feature_without_sums_trains_under_masks() -> None:
    given: dict[str, Any] = {**LOCAL, "rounds": 2, "settings": {"feature.arguments": {"mu": 0.5}}}
    given["clients"] = 5
    plain = headwater.simulate(Signs, **given, feature=features.Pull)
    masked = headwater.simulate(
        Signs, **given, feature=features.Pull, secure_aggregation="semi-honest"
    )
    torch.testing.assert_close(vector(masked.model), vector(plain.model), rtol=1e-3, atol=1e-4)


def test_clients_are_chosen_by_a_feature(tmp_path: Path) -> None:
    run = headwater.simulate(
        Signs, clients=6, cohort_size=2, rounds=6, feature=features.HighestLosses, progress=False
    )
    invited = [{one.name for one in row.clients} for row in run.history]
    assert invited[:3] == [{"0", "1"}, {"2", "3"}, {"4", "5"}]  # the unknown first
    losses = {one.name: one.loss for row in run.history[:3] for one in row.clients}
    for row, names in zip(run.history[3:], invited[3:], strict=True):
        assert names == set(sorted(losses, key=lambda name: -losses[name])[:2])
        losses |= {one.name: one.loss for one in row.clients}


def test_a_holder_of_one_s_own_sees_each_update() -> None:
    given: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.5, "progress": False}
    given |= {"clients": 4, "rounds": 1, "accumulation_steps": 4, "micro_batch_size": 10}
    before = vector(headwater.simulate(Signs, **given | {"learning_rate": 1e-30}).model)
    run = headwater.simulate(Signs, **given, feature=features.GeometricMedian)
    points = []
    for client in range(4):
        model = Signs().new_model()
        put(model, before)
        inputs, labels = Signs().train_examples(data=None, part=client, num_parts=4)[:]
        points.append(gradient(model, (inputs, labels)).double())
    found = ((before - vector(run.model)) / 0.5).double()
    directions = [(point - found) / (point - found).norm() for point in points]
    assert torch.stack(directions).sum(0).norm() < 1e-3  # where the pulls of all points cancel


def test_a_feature_ends_a_run_by_a_rule_of_its_own() -> None:
    run = headwater.simulate(
        Signs, clients=2, rounds=9, feature=features.StopsAtThree, progress=False
    )
    assert len(run.history) == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [("Nothing", "neither a class Server"), ("Secagg", "taken"), ("Missing", "has no Missing")],
)
def test_what_is_no_feature_is_refused_by_its_name(name: str, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        headwater.simulate(Signs, clients=2, rounds=1, feature=named(name), progress=False)


def seen_in(tmp_path: Path, feature: str, **more: Any) -> list[list[float]]:
    given: dict[str, Any] = {"clients": 3, "rounds": 4, "out": tmp_path, "progress": False}
    headwater.simulate(SIGNS, **given | {"feature": named(feature)} | more)
    return kept_in(tmp_path)


def kept_in(tmp_path: Path) -> list[list[float]]:
    """Return what a feature has seen, as its run's checkpoint has it."""
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    found = [one["seen"] for one in saved.progress.features.values() if "seen" in one]
    seen: list[list[float]] = found[0]
    return seen


FIXED: dict[str, Any] = {"accumulation_steps": 2, "micro_batch_size": 8}
FLEET = "[[device]]\nexamples_per_second = 200\nmemory_bytes = 2_000_000_000\n" + (
    "upload_bytes_per_second = 1_000_000\ncount = 3\n"
)


def test_means_and_sums_are_right_in_asynchronous_rounds(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(FLEET)
    settings = {
        "asynchronous.is_on": True,
        "asynchronous.buffer": 2,
        "simulation.fleet": str(tmp_path / "fleet.toml"),
    }
    seen = seen_in(tmp_path / "run", "Ones", settings=settings)
    assert seen == [[1.0, 2.0]] * 4


def test_a_mean_is_weighed_as_the_model_s_under_dataset_weighting(tmp_path: Path) -> None:
    more: dict[str, Any] = {"accumulation_steps": 1, "micro_batch_size": 10}
    seen = seen_in(tmp_path, "Ones", settings={"cohort.weighting": "dataset"}, **more)
    assert seen == [[1.0, 3.0]] * 4


@pytest.mark.parametrize(("every", "expected"), [(1, [3, 6, 9, 12]), (2, [3, None, 6, None])])
def test_a_device_s_state_goes_on_from_round_to_round(
    tmp_path: Path, every: int, expected: list[int | None]
) -> None:
    settings = {"feature.arguments": {"every": every}}
    seen = seen_in(tmp_path, "Counts", settings=settings)
    assert seen == [[] if one is None else [float(one)] for one in expected]


def test_one_client_alone_may_be_asked(tmp_path: Path) -> None:
    assert seen_in(tmp_path, "OneClientAlone") == [[1.0], [2.0], [3.0], [4.0]]


def test_a_value_beyond_its_limit_costs_its_sender_the_round_and_others_nothing(
    tmp_path: Path,
) -> None:
    assert seen_in(tmp_path, "Liar") == [[2.0]] * 4


@pytest.mark.parametrize(
    ("feature", "more", "text"),
    [
        ("Robust", {}, "taken|name of one that Headwater has"),
        ("Holds", {"clients": 5, "settings": {"simulation.aggregators": 2}}, "an aggregator sends"),
        ("Counts", {"aggregation": "median", "clients": 5}, "--aggregation"),
        ("Holds", {"aggregation": "median", "clients": 5}, "another does too"),
        ("Holds", {"clients": 5, "secure_aggregation": "semi-honest"}, "protects their sum"),
        ("Holds", {"privacy_epsilon": 8.0, **FIXED}, "protects their sum"),
        ("Pull", {"privacy_epsilon": 8.0, "privacy_unit": "example", **FIXED}, "unit example"),
        ("Turns", {}, "without --local-steps"),
        ("Signs1Bit", {"clients": 5, "secure_aggregation": "semi-honest"}, "an encoding"),
        ("Signs1Bit", {"settings": {"compression.up": "int8"}}, "an encoding"),
        ("Census", {"settings": {"compression.up": "int8"}}, "rounds without the model"),
        ("Census", {"local_steps": 2}, "rounds without the model"),
        ("Misspelled", {}, "commited"),
        ("OneClientAlone", {"clients": 5, "secure_aggregation": "semi-honest"}, "other than"),
    ],
)
def test_what_does_not_go_together_is_refused_before_the_first_round(
    tmp_path: Path, feature: str, more: dict[str, Any], text: str
) -> None:
    with pytest.raises(SettingsError, match=text):
        seen_in(tmp_path, feature, **more)


@pytest.mark.parametrize(
    ("feature", "text"), [("StateOfText", "state\\['who'\\]"), ("Required", "is required")]
)
def test_a_device_says_what_is_wrong_with_its_feature(
    tmp_path: Path, feature: str, text: str
) -> None:
    with pytest.raises(headwater.HeadwaterError, match=text):
        seen_in(tmp_path, feature, settings={"cohort.max_aborted_rounds": 1})


def test_a_feature_is_not_asked_for_sums_of_no_example(tmp_path: Path) -> None:
    """Its end would divide by a weight of 0, and the window would not be passed over."""
    with pytest.raises(headwater.HeadwaterError, match="none of"):
        headwater.simulate(
            str(HERE / "features.py") + ":NothingUsable",
            clients=2,
            rounds=1,
            feature=named("Counts"),
            progress=False,
            settings={"cohort.max_aborted_rounds": 1, "check_task": False},
        )


@pytest.mark.parametrize("engine", ENGINES)
def test_sums_are_the_same_in_one_process_and_over_a_wire(tmp_path: Path, engine: str) -> None:
    settings = {"simulation.engine": engine}
    assert seen_in(tmp_path, "Sharp", settings=settings) == [[3 * 2.0**24] * 4] * 4


def test_what_one_device_changes_no_other_sees_in_one_process_either(tmp_path: Path) -> None:
    assert seen_in(tmp_path, "Spoils") == [[3.0]] * 4


@pytest.mark.slow
def test_a_feature_works_in_several_processes(tmp_path: Path) -> None:
    settings = {"simulation.workers": 2, "simulation.compute": "one-by-one"}
    assert seen_in(tmp_path, "Counts", settings=settings) == [[3.0], [6.0], [9.0], [12.0]]
    with pytest.raises(SettingsError, match="the feature is a Python object"):
        headwater.simulate(SIGNS, clients=3, rounds=1, feature=features.Counts, settings=settings)


def test_a_feature_that_raises_is_named_and_the_run_goes_on_where_it_was(tmp_path: Path) -> None:
    with pytest.raises(headwater.HeadwaterError, match=r"the feature raises failed.*not today"):
        seen_in(tmp_path, "Raises")
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    assert saved.progress.round == 1


@pytest.mark.slow
@pytest.mark.parametrize("feature", ["TooLong", "TensorTooLong"])
def test_plans_that_are_too_long_end_the_run_with_a_named_error(
    tmp_path: Path, feature: str
) -> None:
    with pytest.raises(SettingsError, match="has room for"):
        seen_in(tmp_path, feature, settings={"simulation.engine": "grpc"})


@pytest.mark.parametrize("engine", ENGINES)
def test_an_encoding_of_one_s_own_is_that_of_a_plain_loop(tmp_path: Path, engine: str) -> None:
    rate = 0.5
    headwater.simulate(
        SIGNS,
        clients=3,
        rounds=2,
        accumulation_steps=4,
        micro_batch_size=10,
        optimizer="sgd",
        learning_rate=rate,
        feature=named("Signs1Bit"),
        out=tmp_path,
        progress=False,
        settings={"simulation.engine": engine},
    )
    model, values_P = Signs().new_model(), vector(initial())
    for _ in range(2):
        put(model, values_P)
        sums = []
        for part in range(3):
            inputs, labels = Signs().train_examples(data=None, part=part, num_parts=3).tensors
            sums.append(40 * gradient(model, (inputs, labels)))
        signs = [torch.where(one >= 0, 1.0, -1.0) * one.abs().mean() for one in sums]
        values_P = values_P - rate * torch.stack(signs).sum(0) / 120
    found = headwater.load_model(tmp_path)
    torch.testing.assert_close(vector(found), values_P, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_rounds_without_the_model_s_sum_step_nothing(tmp_path: Path, engine: str) -> None:
    """Two rounds of counting, then one of training: the step of a run of one round."""
    given: dict[str, Any] = {"accumulation_steps": 4, "micro_batch_size": 10, "optimizer": "sgd"}
    given |= {"learning_rate": 0.5, "clients": 3}
    settings = {"simulation.engine": engine}
    seen = seen_in(tmp_path / "run", "Census", **given | {"rounds": 3}, settings=settings)
    parts = [Signs().train_examples(data=None, part=part, num_parts=3) for part in range(3)]
    labels = torch.cat([part.tensors[1] for part in parts])
    assert seen == [torch.bincount(labels, minlength=2).tolist()] * 3
    rows = read_rows(tmp_path / "run")
    assert [row["loss"] is None for row in rows] == [True, True, False]
    assert [row["learning_rate"] for row in rows] == [0.0, 0.0, 0.5]
    one = headwater.simulate(Signs, **given, rounds=1, progress=False)
    found = vector(headwater.load_model(tmp_path / "run"))
    torch.testing.assert_close(found, vector(one.model), rtol=1e-6, atol=1e-7)


def test_several_features_act_together_in_their_order(tmp_path: Path) -> None:
    """Two pulls are one of both strengths, and each sum is there."""
    given: dict[str, Any] = {**LOCAL, "rounds": 3}
    arguments = {"pull.mu": 0.1, "second.mu": 0.2}
    both = headwater.simulate(
        Signs,
        **given,
        feature=[features.Pull, features.SecondPull, features.Histogram],
        out=tmp_path,
        settings={"feature.arguments": arguments},
    )
    one = headwater.simulate(
        Signs, **given, feature=features.Pull, settings={"feature.arguments": {"mu": 0.3}}
    )
    torch.testing.assert_close(vector(both.model), vector(one.model), rtol=1e-5, atol=1e-6)
    assert len(kept_in(tmp_path)) == 3


@pytest.mark.parametrize("engine", ["in-process", "grpc"])
def test_features_keep_states_apart(tmp_path: Path, engine: str) -> None:
    """Beside an update that is encoded, and a sum that no encoding may round."""
    names = ("Counts", "CountsByTwo", "Histogram")
    places = ",".join(f"{HERE / 'features.py'}:{name}" for name in names)
    given: dict[str, Any] = {"clients": 3, "rounds": 3, "progress": False}
    given |= {"accumulation_steps": 4, "micro_batch_size": 10}
    settings = {"simulation.engine": engine, "compression.up": "int8"}
    headwater.simulate(SIGNS, **given, feature=places, out=tmp_path, settings=settings)
    saved = checkpoint.load(tmp_path)
    assert saved is not None
    parts = [Signs().train_examples(data=None, part=part, num_parts=3) for part in range(3)]
    labels = torch.cat([part[:][1] for part in parts])
    assert saved.progress.features["histogram"]["seen"] == [labels.bincount().tolist()] * 3
    assert saved.progress.features["counts"]["seen"] == [[3.0], [6.0], [9.0]]
    assert saved.progress.features["bytwo"]["seen"] == [[6.0], [12.0], [18.0]]


@pytest.mark.parametrize(
    ("names", "arguments", "text"),
    [
        (("Counts", "Counts"), {}, "two features have the name counts"),
        (("Counts", "Liar"), {}, "has a sum rounds, as one before it"),
        (("Pull", "SecondPull"), {"mu": 0.1}, "the argument mu is for none of"),
        (("Pull", "SecondPull"), {"third.mu": 0.1}, "the argument third.mu is for none of"),
        (("Signs1Bit", "SecondCoding"), {}, "each encode the update"),
    ],
)
def test_features_that_do_not_go_together_are_refused(
    names: Sequence[str], arguments: Mapping[str, float], text: str
) -> None:
    with pytest.raises(SettingsError, match=text):
        headwater.simulate(
            Signs,
            **LOCAL | {"clients": 3},
            rounds=1,
            feature=[getattr(features, name) for name in names],
            settings={"feature.arguments": arguments},
        )
