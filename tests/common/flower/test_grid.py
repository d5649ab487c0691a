"""The private parts of Flower that this project uses: each is there, and works as expected."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
from flwr.app import Array, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.simulation.run_simulation import _run_simulation
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.telemetry import EventType

from headwater.common.errors import UnsupportedFlower
from headwater.common.flower.grid import (
    OF_RAY,
    PRIVATE_PARTS,
    SERVER_NODE_ID,
    check_flower,
    ensure_message_id,
    enter_run,
)
from headwater.common.settings.schema import Settings
from headwater.simulation.engines.message_grid import InProcessGrid


def test_a_run_is_created_from_its_id_alone() -> None:
    assert Run.create_empty(7).run_id == 7


def test_entering_a_run_sets_flower_s_task_identity() -> None:
    enter_run(7)
    identity = (TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id)
    assert identity == (1, 7, SERVER_NODE_ID)


def test_a_message_built_in_a_run_gets_one_id_and_keeps_it() -> None:
    enter_run(7)
    message = Message(RecordDict(), 3, "train")
    assert message.metadata.run_id == 7
    assert "_message_id" in message.metadata.__dict__
    message_id = ensure_message_id(message)
    assert message.metadata.message_id == message_id == ensure_message_id(message)


def test_flower_s_ray_engine_takes_the_arguments_of_run_on_ray() -> None:
    inspect.signature(_run_simulation).bind(
        num_supernodes=2,
        exit_event=EventType.PYTHON_API_RUN_SIMULATION_LEAVE,
        server_app=None,
        client_app=None,
        app_dir="folder",
        is_app=True,
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )


def test_flower_reports_a_failed_client_app_by_an_error_code() -> None:
    assert isinstance(ErrorCode.UNKNOWN, int)


def test_an_array_of_numpy_has_the_header_that_sum_of_gradients_compares() -> None:
    # ``server.flower.sum_of_gradients`` compares this header instead of parsing a reply's bytes.
    array = Array(np.arange(6, dtype=np.float32).reshape(2, 3))
    start = 10 + int.from_bytes(array.data[8:10], "little")
    assert array.data[:8] == b"\x93NUMPY\x01\x00"
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }"
    assert array.data[10:start].strip() == header


@pytest.mark.parametrize(
    "part", [("flwr.supercore.run", "Run.create_nothing"), ("flwr.supercore.absent", "Run")]
)
def test_a_flower_without_a_private_part_is_refused_by_its_name(part: tuple[str, str]) -> None:
    check_flower([*PRIVATE_PARTS, *OF_RAY])
    with pytest.raises(UnsupportedFlower, match=rf"no {part[0]}\.{part[1]}, which headwater uses"):
        check_flower([part])


@pytest.mark.parametrize("name", ["reply_to_message_ids", "message_ids"])
def test_replies_are_pulled_by_the_name_of_every_flower(name: str) -> None:
    grid = InProcessGrid(ClientApp(), Settings(task="tests/tasks.py:TwoLayers"))
    assert list(grid.pull_messages(**{name: []})) == list(grid.pull_messages([])) == []
