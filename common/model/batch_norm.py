"""BatchNorm, which mixes the examples of a batch: refused, frozen, or replaced by GroupNorm.

With its running statistics, as in evaluation mode, a BatchNorm is a scale and a shift of each
channel and mixes nothing. So a pretrained network is fine-tuned: the statistics stay as they are,
the scale and the shift are trained. A network without statistics of its own needs another norm.

The saved model records each replacement with GroupNorm's arguments, so that the same layers can be
put into a model that the task builds anew, here or in plain PyTorch (docs/model.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from headwater.common.errors import BatchDependentLayer, ModelMismatch
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


def refuse_batch_dependent(model: nn.Module) -> None:
    """Refuse a model with layers whose pass in training depends on the rest of the batch.

    A layer that the model itself keeps in evaluation mode, as with a ``train`` of its own, depends
    on its running statistics alone.

    Raises:
        BatchDependentLayer: naming the layers.
    """
    scaled = [name for name, m in model.named_modules() if _divides_by_frequency(m)]
    if scaled:
        raise BatchDependentLayer(
            f"scale_grad_by_freq in {', '.join(scaled[:5])} divides the gradient of a row by how "
            "often the batch has it, so that the sum depends on how the examples are cut",
            remedy="leave scale_grad_by_freq out; Adam and Adagrad give rare rows larger steps",
        )
    named = [(name, m) for name, m in model.named_modules() if isinstance(m, _NormBase)]
    if not named:
        return
    modes = [(module, module.training) for module in model.modules()]
    model.train()
    mixing = [f"{name} ({type(m).__name__})" for name, m in named if _mixes(m)]
    for module, is_training in modes:
        module.training = is_training
    if mixing:
        raise BatchDependentLayer(
            f"the model has {len(mixing)} layer(s) that mix the examples of a batch: "
            f"{', '.join(mixing[:5])}{', ...' if len(mixing) > 5 else ''}"
        )


def _divides_by_frequency(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return False
    return layer.scale_grad_by_freq and layer.weight.requires_grad


def _mixes(layer: _NormBase) -> bool:
    if layer.running_mean is None:
        return isinstance(layer, _BatchNorm)  # another norm has statistics of each example
    return layer.training


def freeze_statistics(model: nn.Module) -> None:
    """Keep every layer that has running statistics in evaluation mode, also after ``train()``."""
    for module in model.modules():
        if isinstance(module, _NormBase) and module.running_mean is not None:
            module.eval()
            vars(module)["train"] = partial(_in_evaluation_mode, module)


def _in_evaluation_mode(layer: nn.Module, mode: bool = True) -> nn.Module:
    return layer


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
            if isinstance(child, _BatchNorm):
                arguments = _arguments_of(child)
                if child not in layers:
                    layers[child] = arguments.layer()
                    if child.affine:
                        values = {"weight": child.weight, "bias": child.bias}
                        layers[child].load_state_dict(values)
                setattr(module, name, layers[child])
                replaced[f"{prefix}.{name}" if prefix else name] = arguments
    return replaced


def _arguments_of(layer: _BatchNorm) -> GroupNormArguments:
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
        is_batch_norm = isinstance(layer, _BatchNorm)
        if not is_batch_norm or getattr(layer, "num_features", None) != channels:
            raise ModelMismatch(
                f"the saved model has a GroupNorm of {channels} channels in place of a BatchNorm "
                f"{name}; the task's model has {layer or 'no such layer'}"
            )
        assert layer is not None
        model.set_submodule(name, layers.setdefault(layer, arguments.layer()))
