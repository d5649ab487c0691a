"""Replaces BatchNorm, which mixes the examples of a batch, by GroupNorm, which does not.

The saved model records each replacement with GroupNorm's arguments, so that the same layers can be
put into a model that the task builds anew, here or in plain PyTorch (docs/model.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from torch import nn

from headwater.common.errors import ModelMismatch


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
    for prefix, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                channels = child.num_features
                max_groups = 1 if isinstance(child, nn.BatchNorm1d) else min(32, channels)
                groups = max(g for g in range(1, max_groups + 1) if channels % g == 0)
                arguments = GroupNormArguments(
                    num_groups=groups, num_channels=channels, eps=child.eps, affine=child.affine
                )
                norm = arguments.layer()
                if child.affine:
                    norm.load_state_dict({"weight": child.weight, "bias": child.bias})
                setattr(module, name, norm)
                replaced[f"{prefix}.{name}" if prefix else name] = arguments
    return replaced


def replay(model: nn.Module, replaced: Mapping[str, GroupNormArguments]) -> None:
    """Put recorded GroupNorm layers into a model that the task has just built.

    Raises:
        ModelMismatch: the model has no BatchNorm of this name and number of channels.
    """
    for name, arguments in replaced.items():
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
        model.set_submodule(name, arguments.layer())
