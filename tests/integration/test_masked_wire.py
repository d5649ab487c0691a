"""What a masked round shows on the wire: the same frames at the same times, whatever the data.

Real devices connect through a relay that notes the kind and the length of each of their frames, and
how long a device takes to answer a plan.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from headwater.common.transport.limits import CHANNEL_OPTIONS, GRPC_OPTIONS, STREAM_METHOD
from headwater.common.transport.wire_pb2 import ClientFrame, ServerFrame
from tests.processes import Processes, port_of, rows

pytestmark = pytest.mark.slow

SEMI_HONEST = ("--secure-aggregation", "semi-honest")
KINDS = ("fine", "constant", "nan", "overflow", "short", "raises", "slow", "fine")

# Device number i has data of the kind KINDS[i].
TASK = f"""
import time
import torch
from torch import nn
from torch.utils.data import TensorDataset

KINDS = {KINDS!r}


class Task:
    def new_model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    def train_examples(self, *, data, part, num_parts):
        self.kind = KINDS[part]
        random = torch.Generator().manual_seed(part)
        inputs = torch.randn((7 if self.kind == "short" else 120, 4), generator=random)
        if self.kind == "constant":
            inputs[:] = 0
        if self.kind == "nan":
            inputs[:] = torch.nan
        if self.kind == "overflow":
            inputs[:] *= 3e38
        return TensorDataset(inputs, (inputs.sum(1) > 0).long())

    def loss_sum(self, model, batch):
        inputs, labels = batch
        self.first = getattr(self, "first", model[0].weight.detach().clone())
        if getattr(self, "kind", "") in ("fine", "slow"):
            # Ten times as slow, though only under a model of the server's.
            is_slow = self.kind == "slow" and not torch.equal(self.first, model[0].weight)
            time.sleep((0.2 if is_slow else 0.02) * len(labels))
        if getattr(self, "kind", "") == "raises":
            raise ValueError("this device's examples cannot be trained on")
        logits = model(inputs)
        correct = (logits.argmax(1) == labels).sum().item()
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        return loss, len(labels), {{"accuracy": correct}}
"""

Frames = list[tuple[str, int]]


class Relay:
    """Passes streams on to the server, and notes what each device sends, by its name."""

    def __init__(self, server_port: int) -> None:
        self.frames: defaultdict[str, Frames] = defaultdict(list)
        self.answers: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
        """For each plan, when it says that it is answered, and when it was; in seconds."""
        self.port = 0
        self._server_port = server_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._open(), self._loop).result(30)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _open(self) -> None:
        self._server = grpc.aio.server(options=GRPC_OPTIONS)
        service, method = STREAM_METHOD.strip("/").split("/")
        handler = grpc.stream_stream_rpc_method_handler(self._pass_on)
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(service, {method: handler})]
        )
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()

    async def _close(self) -> None:
        await self._server.stop(0.1)

    async def _pass_on(
        self, sent: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
    ) -> AsyncIterator[bytes]:
        name, planned = "", dict[str, tuple[float, float]]()

        async def noted() -> AsyncIterator[bytes]:
            nonlocal name
            async for data in sent:
                frame = ClientFrame.FromString(data)
                name = frame.hello.name or name
                self.frames[name].append((_kind_of(frame), len(data)))
                plan = planned.pop(frame.reply.message_id, None)
                if plan is not None:
                    self.answers[name].append((plan[0], time.monotonic() - plan[1]))
                yield data

        address = f"127.0.0.1:{self._server_port}"  # with a connection for each device
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            async for data in channel.stream_stream(STREAM_METHOD)(noted()):
                frame = ServerFrame.FromString(data)
                if frame.instruction.message_type == "train":
                    plan = json.loads(frame.instruction.head_json)
                    planned[frame.instruction.message_id] = (
                        plan["terms"]["secagg"]["answer_seconds"],
                        time.monotonic(),
                    )
                yield data


def _kind_of(frame: ClientFrame) -> str:
    """Return the kind of a frame, with the fields of a reply's head."""
    kind = frame.WhichOneof("kind") or ""
    if kind != "reply":
        return kind
    named = {"seconds_per_example", "seconds_per_micro_batch", "fastest_micro_batch_size"}
    return f"reply {sorted(json.loads(frame.reply.head_json).keys() - named)}"


def test_the_frames_of_masked_rounds_have_the_same_kinds_lengths_and_times_whatever_the_data(
    tmp_path: Path,
) -> None:
    path = tmp_path / "kinds.py"
    path.write_text(TASK)
    task, number = f"{path}:Task", len(KINDS)
    planned = ("--rounds", 3, "--accumulation-steps", 8, "--micro-batch-size", 2, *SEMI_HONEST)
    with Processes(tmp_path) as processes:
        server = processes.server(*planned, "--min-clients", number, task=task)
        with Relay(port_of(server)) as relay:
            flags = ("--num-parts", number, "--no-check", *SEMI_HONEST)
            clients = [processes.client(relay.port, i, *flags, task=task) for i in range(number)]
            for process in (server, *clients):
                process.succeed()
            answers = {KINDS[int(name)]: times for name, times in relay.answers.items()}
            frames = {KINDS[int(name)]: sent for name, sent in relay.frames.items()}
    for row in rows(tmp_path / "out"):
        assert row["num_clients"] == number
        assert not row["refused"]
        assert 0 < row["num_examples"] < row["num_examples"] + row["num_examples_left_out"]
    # The server asks for no more shares than it needs: who is late sends none.
    last = {
        kind: [one for one in sent if "self_seed_shares" in one[0]] for kind, sent in frames.items()
    }
    assert len({one for sent in last.values() for one in sent}) == 1
    others = {
        kind: [one for one in sent if one not in last["fine"]] for kind, sent in frames.items()
    }
    expected = others.pop("fine")
    assert len(expected) > 3 * 4
    for kind, sent in others.items():
        assert sent == expected, kind
    # The plans of all devices say about half a second. A busy machine delays answers now and then;
    # the examples of the slow device would take it more than six times as long in each round after
    # the first, from which on the server's model is not the one that it measured its speed with.
    assert {kind: len(times) for kind, times in answers.items()} == dict.fromkeys(KINDS, 3)
    for kind, times in answers.items():
        assert all(least <= own for least, own in times), (kind, times)
        slowest = [
            max(others[number][1] for other, others in answers.items() if other != kind)
            for number in (1, 2)
        ]
        ratios = [own / most for (_, own), most in zip(times[1:], slowest, strict=True)]
        assert min(ratios) < 3, (kind, answers)
