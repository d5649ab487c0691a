"""Optimizers without torch's compiler: the same steps, and nothing is left of the stand-in.

This needs a process that has not loaded the compiler yet: one for what leaves it so and then loads
it, and one in which the block itself loads it.
"""

from __future__ import annotations

import pytest

from tests.commands import python

START = """
import sys
import torch
from headwater.common.optimizers.torch_compiler_stub import without_dynamo
NAME = "torch._dynamo"
"""

EVERY_OPTIMIZER = """
from torch.optim import Optimizer
# As in server/aggregation/server_optimizer.py:
refused = {torch.optim.LBFGS, torch.optim.SparseAdam}
kinds = [
    kind for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
]
kinds = [kind for kind in kinds if kind not in refused]
assert len(kinds) >= 12

def steps(kind):
    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(torch.randn(3, 4, generator=generator))
    optimizer = kind([parameter], lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(3):
        parameter.grad = torch.randn(3, 4, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    optimizer.load_state_dict(optimizer.state_dict())
    return parameter.detach()

with without_dynamo():
    found = [steps(kind) for kind in kinds]
assert NAME not in sys.modules and "_dynamo" not in vars(torch)
import torch._dynamo
for kind, parameter in zip(kinds, found):
    assert torch.equal(parameter, steps(kind)), kind
"""

ANOTHER_NAME_LOADS_THE_REAL_ONE = """
with without_dynamo():
    stub = sys.modules[NAME]
    assert stub.is_compiling is not None
    assert sys.modules[NAME] is not stub
assert sys.modules[NAME] is torch._dynamo and torch._dynamo is not stub
"""

NESTED = """
with without_dynamo():
    with without_dynamo():
        pass
    assert NAME in sys.modules
assert NAME not in sys.modules
try:
    with without_dynamo():
        raise ValueError
except ValueError:
    assert NAME not in sys.modules
"""

THE_REAL_ONE_STAYS = """
import torch._dynamo
real = torch._dynamo
with without_dynamo():
    assert sys.modules[NAME] is real
assert sys.modules[NAME] is real is torch._dynamo
"""

SERVER_OPTIMIZER = """
from headwater.common.model.parameters import ModelImage
from headwater.common.settings.schema import OptimizerSettings, ScheduleSettings
from headwater.server.aggregation.server_optimizer import ServerOptimizer

image = ModelImage(torch.nn.Linear(2, 2))
schedule = ScheduleSettings(name="CosineAnnealingLR", arguments={"T_max": 3})
chosen = OptimizerSettings(name="adam"), schedule
optimizer = ServerOptimizer(image, *chosen)
optimizer.step(torch.ones(6))
optimizer.restore(*optimizer.state())
assert NAME not in sys.modules
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "body",
    [
        SERVER_OPTIMIZER + NESTED + EVERY_OPTIMIZER + THE_REAL_ONE_STAYS,
        ANOTHER_NAME_LOADS_THE_REAL_ONE,
    ],
    ids=["optimizers, nested blocks and the real one", "another name"],
)
def test_an_optimizer_needs_no_compiler(body: str) -> None:
    python("-W", "error", "-c", START + body)
