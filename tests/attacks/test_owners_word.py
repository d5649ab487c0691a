"""Who starts a run on SuperNodes sets its values: none takes a limit from a node's owner."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict

from headwater.client.app import app
from headwater.client.device.hardware import this_machine
from headwater.client.flower.node import Node
from headwater.client.flower.owners_word import (
    FLOORS,
    OTHERS,
    OWN,
    as_owner_requires,
    key_of,
)
from headwater.client.flower.request import OWN_SETTINGS, DeviceRequest, read_request
from headwater.client.flower.state_file import SPEED
from headwater.client.secagg.prepare import floor_of
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.errors import SettingsError, TaskError
from headwater.common.estimates.linear_fit import Line
from headwater.common.flower import records
from headwater.common.flower.grid import enter_run
from headwater.common.settings.schema import SecureSettings, Settings
from headwater.common.settings.sources import load
from headwater.common.task import load_task
from headwater.common.user_code.named_objects import constructed
from tests.masked import RUN, plan
from tests.python_tasks import SIGNS

# A value of each that gives the device away, and one that protects it more than the default.
WEAK = {
    "aggregation": "off",
    "min_members": 3,
    "min_quota": 1,
    "max_plans": 10**6,
    "min_survivors": 0.01,
    "max_share": 1.0,
    "member_bits": 1,
    "corrupted": 0.0,
    "dropout": 0.0,
}
STRICT = {
    "aggregation": "active",
    "min_members": 9,
    "min_quota": 64,
    "max_plans": 2,
    "min_survivors": 0.9,
    "max_share": 0.2,
    "member_bits": 9,
    "corrupted": 0.3,
    "dropout": 0.3,
}
DEFAULT = SecureSettings()


def of_a_run(**secure: Any) -> Settings:
    return load(None, {f"secure.{name}": value for name, value in secure.items()})


def test_every_setting_of_masks_is_a_floor_or_says_why_not() -> None:
    fields = set(SecureSettings.model_fields)
    assert fields == {*FLOORS, *OWN, *OTHERS}
    assert set(WEAK) == set(STRICT) == set(FLOORS)


@pytest.mark.parametrize("name", FLOORS)
def test_a_run_lowers_no_floor(name: str) -> None:
    """Neither the default, nor what the node's configuration says."""
    weak, strict = WEAK[name], STRICT[name]
    run = of_a_run(**{name: weak})
    assert getattr(as_owner_requires(run, {}).secure, name) == getattr(DEFAULT, name)
    assert getattr(as_owner_requires(run, {key_of(name): strict}).secure, name) == strict
    assert getattr(as_owner_requires(of_a_run(**{name: strict}), {}).secure, name) == strict
    # The owner may allow more than the default, and a run may ask for less of it.
    loose = getattr(as_owner_requires(run, {key_of(name): weak}).secure, name)
    assert loose == weak


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("max-share", 2.0, "the node's max-share is 2.0"),
        ("min-members", 1, "the node's min-members is 1"),
        ("secure-aggregation", "none", "the node's secure-aggregation is 'none'"),
        ("privacy-budget", -1, "the node's privacy-budget is -1"),
    ],
)
def test_a_node_s_configuration_is_checked(key: str, value: Any, text: str) -> None:
    with pytest.raises(SettingsError, match=text):
        as_owner_requires(Settings(), {key: value})


def test_a_budget_of_the_owner_s_holds_on_a_supernode() -> None:
    owners = {"privacy-budget": 3.0, "privacy-unit": "example", "privacy-delta": 1e-6}
    for run in ({}, {"privacy.budget": 999.0}, {"privacy.delta": 0.1}):
        found = as_owner_requires(load(None, run), owners).privacy
        assert (found.budget, found.unit, found.delta) == (3.0, "example", 1e-6)
    assert as_owner_requires(load(None, {"privacy.budget": 2.0}), owners).privacy.budget == 2.0


def request_of(run: Settings, **node_config: Any) -> DeviceRequest:
    """Return a plan as the app of a device gets it."""
    enter_run(RUN)
    given = {"name": "pi", "partition-id": 0, "num-partitions": 1, **node_config}
    context = Context(
        run_id=RUN,
        node_id=1,
        node_config=given,
        state=RecordDict(),
        run_config=run.to_run_config(),
    )
    message = Message(records.content_of(plan()), 1, "train")
    return read_request(message, context, this_machine)


def test_the_owner_s_limits_reach_the_session_of_a_supernode_alone() -> None:
    """A device of ``headwater-client`` has no other settings than its owner's."""
    run = of_a_run(**{**WEAK, "aggregation": "semi-honest", "order_seed": 7})
    kept = floor_of(request_of(run, **{"max-share": 0.3}).settings.secure)
    assert (kept.max_share, kept.min_survivors, kept.member_bits) == (0.3, 0.7, 4)
    assert request_of(run).settings.secure.order_seed is None
    own = floor_of(request_of(run, **{OWN_SETTINGS: True}).settings.secure)
    assert (own.max_share, own.min_survivors, own.member_bits) == (1.0, 0.01, 1)


def test_a_node_of_our_own_has_its_owner_s_settings(tmp_path: Path) -> None:
    chosen = load(None, {"task": SIGNS, "secure.aggregation": "semi-honest", "secure.min_quota": 1})
    trainer = Trainer(SIGNS, batch_norm=None, check_task=False)
    identity = Identity(name="pi", data=None, part=0, num_parts=1)
    node = Node(app, trainer, identity, chosen, tmp_path)
    node.enter(RUN)
    assert node._context is not None
    assert node._context.node_config[OWN_SETTINGS] is True


def test_no_class_is_constructed_that_is_no_algorithm_and_no_task(tmp_path: Path) -> None:
    """A bundle lists the names of arguments, and a run sets them: of a shell as well."""
    from headwater.client.algorithms.lookup import algorithm_of

    trace = tmp_path / "trace"
    run = load(None, {"algorithm.name": "subprocess:Popen"})
    chosen = run.algorithm.model_copy(
        update={"arguments": {"args": f"touch {trace}", "shell": True}}
    )
    with pytest.raises(SettingsError, match="has no method train"):
        algorithm_of(chosen)
    with pytest.raises(TaskError, match="none of the methods"):
        load_task("subprocess:Popen")
    assert not trace.exists()


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("min_members", "min-members"),
        ("secure.min-members", "min-members"),
        ("secure_aggregation", "secure-aggregation"),
        ("secure-agregation", "secure-aggregation"),
        ("Max-Share", "max-share"),
        ("privacy_budget", "privacy-budget"),
        ("privacy.budget", "privacy-budget"),
        ("allow_list", "allow-list"),
        ("run-time", "runtime"),
        ("memory_limit", "memory-limit"),
    ],
)
def test_a_limit_under_a_misspelt_key_is_named(key: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=f"{key}, which is no setting") as caught:
        as_owner_requires(of_a_run(), {key: 1})
    assert f"write it as {meant}" in str(caught.value.remedy)


@pytest.mark.parametrize(
    "key", ["aggregation", "secagg", "masks", "secure.mode", "epsilon", "budget", "members"]
)
def test_a_key_that_speaks_of_a_limit_and_is_none_is_named(key: str) -> None:
    with pytest.raises(SettingsError, match=f"{key}, which is no setting") as caught:
        as_owner_requires(of_a_run(), {key: 1})
    assert "secure-aggregation" in str(caught.value.remedy)


def test_a_limit_that_needs_another_one_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SettingsError, match="privacy-delta and no privacy-budget"):
        as_owner_requires(of_a_run(), {"privacy-delta": 1e-6})
    as_owner_requires(of_a_run(), {"min-members": 10})
    assert "min-members of the node's configuration holds where a run has masks" in caplog.text


def test_keys_that_are_no_limits_are_left_alone() -> None:
    keys = ("name", "partition-id", "num-partitions", "data", "state", "runtime", "share", "color")
    as_owner_requires(of_a_run(), dict.fromkeys(keys, 1))


@pytest.mark.parametrize("owners", [{"secure-aggregation": "semi-honest"}, {"privacy-budget": 3.0}])
@pytest.mark.parametrize(
    "partition", [{"kind": "iid", "examples_per_device": 1}, {"kind": "quantity:5"}]
)
def test_a_run_divides_no_node_s_own_data_where_its_owner_sets_limits(
    owners: dict[str, Any], partition: dict[str, Any]
) -> None:
    """One example is below each ``min-quota``; a seed leaves all nodes but one hardly any."""
    run = load(None, {f"partition.{name}": value for name, value in partition.items()})
    assert as_owner_requires(run, {}).partition == run.partition
    with pytest.raises(SettingsError) as error:
        as_owner_requires(run, owners)
    assert "partition" in str(error.value.remedy)


@pytest.mark.parametrize("owners", [{"secure-aggregation": "active"}, {"privacy-budget": 3.0}])
def test_a_superlink_gives_no_node_less_memory_time_or_threads_where_its_owner_sets_limits(
    owners: dict[str, Any],
) -> None:
    """Each node asks for the run's values itself; a member that has no memory adds nothing."""
    run = load(
        None,
        {
            "client.memory_limit_bytes": 1 << 20,
            "client.battery_share": 0.01,
            "client.active_hours": "00:00-00:01",
            "threads": 1,
        },
    )
    found = as_owner_requires(run, owners)
    assert found.client == Settings().client
    assert found.threads is None
    assert as_owner_requires(run, {}).client == run.client
    own = as_owner_requires(run, {**owners, "memory-limit": 1 << 30})
    assert own.client.memory_limit_bytes == 1 << 30
    with pytest.raises(SettingsError, match="the node's memory-limit is 'much'"):
        as_owner_requires(run, {**owners, "memory-limit": "much"})


@pytest.mark.parametrize("key", ["task", "algorithm.name", "feature.name"])
@pytest.mark.parametrize("place", ["/tmp/settings.py:X", "../other.py:X", "~/own.py:X"])
def test_a_run_names_no_file_outside_of_its_bundle_where_the_owner_sets_limits(
    key: str, place: str
) -> None:
    run = load(None, {key: place})
    with pytest.raises(SettingsError, match="leads out of its bundle") as caught:
        as_owner_requires(run, {"secure-aggregation": "semi-honest"})
    assert place not in str(caught.value)
    as_owner_requires(load(None, {key: "examples/mine.py:X"}), {"secure-aggregation": "active"})


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ('TOKEN = "tok_12345" oops', "tok_12345"),
        ('import os\nHOST = os.environ["NO_SUCH"]  # prod-db.internal', "prod-db.internal"),
        (
            "class Own:\n    def train(self): ...\n    def __init__(self): raise OSError('tok_1')",
            "tok",
        ),
    ],
)
def test_no_line_and_no_error_of_a_file_that_a_run_names_travels_to_the_server(
    code: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(SettingsError) as caught:
        constructed(f"{tmp_path}/own.py:Own", {}, what="client algorithm", method="train")
    assert said in str(caught.value)
    told = records.to_flower_error(caught.value).reason or ""
    assert said not in told
    assert str(tmp_path) not in told


def test_nothing_of_another_run_of_a_series_is_known_in_a_run() -> None:
    """Flower hands a node's context on, also the speed that plans are checked by."""
    before = request_of(of_a_run())
    records.save_state(before.context, SPEED, Line(base=1e-9, each=1e-9))
    assert before.speed is not None
    context = Context(
        run_id=RUN + 1,
        node_id=1,
        node_config=before.context.node_config,
        state=before.context.state,
        run_config=before.context.run_config,
    )
    enter_run(RUN + 1)
    assert read_request(before.message, context, this_machine).speed is None
    records.save_state(context, SPEED, Line(base=1.0, each=1.0))
    assert read_request(before.message, context, this_machine).speed is not None
