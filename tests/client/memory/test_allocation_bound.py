"""An allocation beyond a bound fails; the process's own bound is no limit of the machine."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from headwater.client.memory.allocation_bound import bound_in_force, bounded
from headwater.client.memory.peak_model import resident_bytes
from headwater.client.memory.process_limits import MemoryLimits
from headwater.common.system.portability import optional_module

resource = optional_module("resource")
MIB = 2**20
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts so on Linux alone")


@LINUX
def test_an_allocation_beyond_the_bound_fails_and_one_within_it_does_not() -> None:
    with bounded(resident_bytes() + 256 * MIB):
        torch.empty(64 * MIB, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(512 * MIB, dtype=torch.uint8)
    torch.empty(512 * MIB, dtype=torch.uint8)


@LINUX
def test_an_inner_bound_changes_nothing_and_the_outer_one_ends_with_its_block() -> None:
    with bounded(resident_bytes() + 256 * MIB):
        outer = bound_in_force()
        assert outer is not None
        with bounded(1):
            assert bound_in_force() == outer
        assert bound_in_force() == outer
    assert bound_in_force() is None


@LINUX
def test_another_thread_may_begin_where_nothing_is_left() -> None:
    """gRPC ends the process where its thread cannot begin."""
    with bounded(1):
        assert bound_in_force() is not None
        begun = threading.Thread(target=threading.Event)
        begun.start()
        begun.join()
        with pytest.raises(RuntimeError, match="can't allocate memory"):
            torch.empty(256 * MIB, dtype=torch.uint8)


def interrupted_within(limit_bytes: int) -> None:
    with bounded(limit_bytes):
        assert bound_in_force() == resource.getrlimit(resource.RLIMIT_DATA)[0]
        raise KeyboardInterrupt


@LINUX
def test_the_limit_is_as_before_after_an_interruption() -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(KeyboardInterrupt):
        interrupted_within(resident_bytes() + 256 * MIB)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


FORKED = """
import os, resource
from headwater.client.memory.allocation_bound import bound_in_force, bounded
from headwater.client.memory.peak_model import resident_bytes
before = resource.getrlimit(resource.RLIMIT_DATA)
with bounded(resident_bytes() + (256 << 20)):
    assert bound_in_force() is not None
    child = os.fork()
    if child == 0:
        is_free = bound_in_force() is None and resource.getrlimit(resource.RLIMIT_DATA) == before
        os._exit(0 if is_free else 1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), bound_in_force() is None)
"""


@LINUX
@pytest.mark.slow
def test_a_forked_worker_has_no_bound() -> None:
    """It may live longer than the bound."""
    command = [sys.executable, "-W", "ignore", "-c", FORKED]  # a process that no other test used
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "False"]


PRODUCTS = """
import threading
import torch
from headwater.client.memory.allocation_bound import bounded
from headwater.client.memory.peak_model import resident_bytes, status_bytes
from headwater.common.system.heap import release_product_buffers

def product():
    wide = torch.randn(1024, 4096, requires_grad=True)
    (torch.randn(512, 1024) @ wide).square().sum().backward()
    multiplied.set()
    ended.wait()

with bounded(resident_bytes() + (1 << 30)):
    pass  # prepares what the first bound prepares
multiplied, ended = threading.Event(), threading.Event()
thread = threading.Thread(target=product)
thread.start()
multiplied.wait()
with bounded(resident_bytes() + (1 << 30)):
    begun = status_bytes("VmData")
    release_product_buffers()
    print(begun - status_bytes("VmData"))
ended.set()
thread.join()
"""


@LINUX
@pytest.mark.slow
@pytest.mark.skipif(not torch._C.has_mkl, reason="buffers of MKL")
def test_buffers_that_another_thread_s_products_left_take_no_room() -> None:
    """Such as those of the thread that checked the task: 4 MB on one processor, 39 on another."""
    command = [sys.executable, "-W", "ignore", "-c", PRODUCTS]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(found.stdout) < MIB // 16, "some were left"


BUILT = """
import sys
from headwater.client.memory.peak_model import status_bytes
from headwater.client.trainer.trainer import Trainer
begun = status_bytes("VmData") - status_bytes("RssAnon")
trainer = Trainer(sys.argv[1], batch_norm=None, check_task=True)
held = trainer.image.layout.num_bytes
print(held, status_bytes("VmData") - status_bytes("RssAnon") - begun)
"""
MANY_LAYERS = """
import torch
from torch import nn

class Wide:
    def new_model(self):
        return nn.Sequential(*[self.layer(n) for n in range(100)])

    def layer(self, n):
        drawn = torch.randn(1024, 1024)
        layer = nn.Linear(1024, 1024, bias=False)
        with torch.no_grad():
            layer.weight.copy_(drawn / 32)
        layer.note = bytes(100_000)  # stays in the heap, above the weight
        return layer

    def train_examples(self, *, data, part, num_parts):
        return torch.utils.data.TensorDataset(torch.ones(8, 1024))

    def loss_sum(self, model, batch):
        return model(batch[0]).sum(), len(batch[0])
"""


@LINUX
@pytest.mark.slow
def test_a_model_that_moved_into_its_image_leaves_no_holes_in_the_heap(tmp_path: Path) -> None:
    """They stay mapped: a bound counts them, and what is mapped apart cannot use them."""
    (tmp_path / "wide.py").write_text(MANY_LAYERS)
    command = [sys.executable, "-W", "ignore", "-c", BUILT, f"{tmp_path}/wide.py:Wide"]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    held, unwritten = map(int, found.stdout.split())
    assert held == 400 * MIB
    assert unwritten < 96 * MIB, "what the model left is still mapped"


def test_the_bound_is_no_limit_of_the_machine() -> None:
    """Else it would count as one of virtual memory, under which training is slower."""
    with bounded(resident_bytes() + 256 * MIB):
        sources = {limit.source for limit in MemoryLimits().all()}
    assert sources == {limit.source for limit in MemoryLimits().all()}


def test_without_a_limit_nothing_is_bounded() -> None:
    with bounded(None):
        assert bound_in_force() is None
