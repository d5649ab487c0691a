"""Replaces BatchNorm, which mixes the examples of a batch, by GroupNorm, which does not.

The saved model records each replacement with GroupNorm's arguments, so that the same layers can be
put into a model that the task builds anew, here or in plain PyTorch (docs/model.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import nn

from headwater.common.errors import ModelMismatch
from headwater.common.model.tensor_file import without_wrappers


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupNormArguments:
    """The arguments of ``nn.GroupNorm``."""

    num_groups: int
    num_channels: int
    eps: float
    affine: bool

    def layer(self) -> nn.GroupNorm:
        """Return a new layer."""
        return nn.GroupNorm(**asdict(self))


def replace_batch_norm_by_group_norm(model: nn.Module) -> dict[str, GroupNormArguments]:
    """Replace every BatchNorm by a GroupNorm with the same scale and shift; return them by name.

    The number of groups is the largest divisor of the channels up to 32 (Wu and He 2018, section
    4). A BatchNorm1d gets one group: flat features have one value per channel, and a group of one
    value is always normalised to zero.
    """
    replaced: dict[str, GroupNormArguments] = {}
    layers: dict[nn.Module, nn.GroupNorm] = {}
    for prefix, module in list(model.named_modules()):
        for name, child in list(module._modules.items()):  # a layer that is used twice comes twice
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                arguments = _arguments_of(child)
                if child not in layers:
                    layers[child] = arguments.layer()
                    if child.affine:
                        values = {"weight": child.weight, "bias": child.bias}
                        layers[child].load_state_dict(values)
                setattr(module, name, layers[child])
                replaced[f"{prefix}.{name}" if prefix else name] = arguments
    return replaced


def _arguments_of(layer: nn.modules.batchnorm._BatchNorm) -> GroupNormArguments:
    channels = layer.num_features
    max_groups = 1 if isinstance(layer, nn.BatchNorm1d) else min(32, channels)
    groups = max(g for g in range(1, max_groups + 1) if channels % g == 0)
    return GroupNormArguments(
        num_groups=groups, num_channels=channels, eps=layer.eps, affine=layer.affine
    )


def replay(model: nn.Module, replaced: Mapping[str, GroupNormArguments]) -> None:
    """Put recorded GroupNorm layers into a model that the task has just built.

    Raises:
        ModelMismatch: the model has no BatchNorm of this name and number of channels.
    """
    layers: dict[nn.Module, nn.GroupNorm] = {}
    places = without_wrappers(model, (name for name, _ in model.named_modules()))
    own = {plain: name for name, plain in places.items()}
    for plain, arguments in replaced.items():
        name = own.get(plain, plain)
        try:
            layer: nn.Module | None = model.get_submodule(name)
        except AttributeError:
            layer = None
        channels = arguments.num_channels
        is_batch_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm)
        if not is_batch_norm or getattr(layer, "num_features", None) != channels:
            raise ModelMismatch(
                f"the saved model has a GroupNorm of {channels} channels in place of a BatchNorm "
                f"{name}; the task's model has {layer or 'no such layer'}"
            )
        assert layer is not None
        model.set_submodule(name, layers.setdefault(layer, arguments.layer()))
