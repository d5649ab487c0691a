"""Parameters that stay on the device: which tensors the patterns name, and what they leave out."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from torch import Tensor, nn

from headwater.common.errors import LocalParametersUnusable
from headwater.common.model.local_parameters import by_all_names, local_names
from headwater.common.model.parameters import ModelImage, build_model, state_dict
from tests.tasks import TwoLayers


class Net(nn.Module):
    """An embedding tied to the output, a frozen layer, a buffer in the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 3)
        self.body = nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 2)
        self.head.register_buffer("scale", torch.full((2,), 7.0))
        self.out = nn.Linear(3, 4, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.body(self.embed(tokens))))


def image(*patterns: str) -> ModelImage:
    return ModelImage(Net(), local_parameters=",".join(patterns) or None)


def test_a_pattern_names_parameters_and_buffers() -> None:
    assert local_names(Net(), "head.*") == {"head.weight", "head.bias", "head.scale"}
    names = {"body.weight", "body.bias", "head.weight"}
    assert local_names(Net(), "body.*,head.w*") == names


@pytest.mark.parametrize(
    ("patterns", "text"),
    [
        (("heads.*",), "'heads.*' names nothing in the model, which has embed.weight"),
        (("head.*", "typo"), "'typo' names nothing"),
        (("head.*", "frozen.*"), "it names frozen.weight, which is frozen"),
        (("out.*",), r"it names out.weight and not embed.weight, which is the same tensor"),
        (("head.scale",), r"it names only buffers \(head.scale\)"),
        (("embed.*", "out.*", "body.*", "head.*"), "every parameter that is trained"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(patterns: tuple[str, ...], text: str) -> None:
    with pytest.raises(LocalParametersUnusable, match=text):
        image(*patterns)


def test_a_tied_weight_stays_under_both_of_its_names() -> None:
    found = image("embed.*", "out.*")
    assert found.local_names == {"embed.weight", "out.weight"}
    assert [slot.name for slot in found.layout.local] == ["embed.weight"]
    assert "out.weight" not in state_dict(found)
    assert by_all_names(found.model, {"embed.weight": found.local_L}).keys() == found.local_names


def test_what_stays_is_in_neither_vector_nor_image_nor_saved_model() -> None:
    whole, shared = image(), image("head.*")
    num_head = 3 * 2 + 2
    assert shared.layout.num_parameters == whole.layout.num_parameters - num_head
    assert shared.layout.num_local == num_head
    assert not {slot.name for slot in shared.layout.frozen} & {"head.scale"}
    assert shared.layout.num_bytes == whole.layout.num_bytes - 4 * num_head
    assert state_dict(shared).keys() == state_dict(whole).keys() - shared.local_names
    assert [p.shape for p in shared.local()] == [(2, 3), (2,)]
    assert all(parameter not in set(shared.local()) for parameter in shared.trainable())


def test_the_model_computes_with_the_local_vector() -> None:
    found = image("head.*")
    found.local_L.zero_()
    found.local_L[-2:] = torch.tensor([1.0, 2.0])
    assert found.model(torch.tensor([0])).tolist() == [[1.0, 2.0]]
    assert found.model.get_buffer("head.scale").tolist() == [7.0, 7.0]


def test_the_digest_tells_which_parameters_stay_and_not_how_they_were_named() -> None:
    one_by_one = image("head.bias", "head.weight", "*.scale")
    assert image("head.*").layout.digest == one_by_one.layout.digest
    digests = {image(*one).layout.digest for one in ((), ("head.*",), ("body.*",))}
    assert len(digests) == 3


def test_without_patterns_the_digest_is_that_of_earlier_versions() -> None:
    rows = [
        ["0.weight", [2, 3], "float32", 0],
        ["0.bias", [2], "float32", 24],
        ["1.weight", [1, 2], "float32", 32],
        ["1.bias", [1], "float32", 40],
    ]
    layout = build_model(TwoLayers(), seed=0).layout
    assert layout.digest == hashlib.sha256(json.dumps(rows).encode()).hexdigest()
