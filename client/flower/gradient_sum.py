"""Sums gradients in a user's own training loop, above all in a Flower app's ClientApp.

Create a ``GradientSum`` once the model holds the round's parameters, call
``backward(loss_sum, n)`` for each batch with a *summed* loss and the number of its examples, and
return ``reply(message, metrics)``. ``server.flower.sum_of_gradients`` adds the sums of all clients,
divides once and takes one step.

What is checked, and what cannot be: that nothing but ``backward`` wrote to the gradients, that the
parameters stayed those that the server sent, and, by autograd's graph, that each loss is a sum
(``loss_reduction`` says what the graph does not show; then a warning is logged).
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MetricRecord
from torch import Tensor, nn

from headwater.client.flower.loss_reduction import LossReduction, watch
from headwater.client.training.accumulator import Accumulator
from headwater.common.errors import (
    CountsDisagree,
    EmptyUpdate,
    GradientsChanged,
    MeanLeftIn,
    OtherParameters,
    ParametersChanged,
    TaskError,
)
from headwater.common.flower.gradient_reply import reply_content
from headwater.common.model.parameters import ModelImage

log = logging.getLogger("flwr.headwater")  # Flower shows what its own logger's children say


class GradientSum:
    """The sum of the gradients of every ``backward`` since this object was created, or replied.

    One object may serve many rounds: the first ``backward`` after a ``reply`` begins a new sum at
    the parameters as they are then.
    """

    def __init__(self, model: nn.Module) -> None:
        """Move the model's parameters into one block of memory, and its gradients into one vector.

        Raises:
            BatchDependentLayer, UnsupportedModel: see ``ModelImage``.
        """
        self.weight = 0
        """The examples, or tokens, that the losses of this sum were summed over."""
        self._image = ModelImage(model)
        self._accumulator = Accumulator(self._image)
        self._begin()

    def _begin(self) -> None:
        """Begin a sum of nothing at the parameters as they are."""
        self.weight = 0
        self._accumulator.zero()
        self._parameters_before = self._parameter_versions()
        self._gradients_before = self._accumulator.num_changes
        self._factors = _SumFactors()
        self._num_passes = 0
        self._is_reduction_seen = True
        self._most_rows = 1
        self._has_rows = True
        model = self._image.model
        self._hook = model.register_forward_hook(self._note_rows, with_kwargs=True)
        self._is_sent = False

    def backward(self, loss_sum: Tensor, n: int) -> None:
        """Add the gradients of a loss that was summed over ``n`` examples (or tokens), and count n.

        Raises:
            MeanLeftIn: the loss is a mean, or a sum that was divided or multiplied by ``n``.
            CountsDisagree: ``n`` is not a whole number from 0.
            ParametersChanged: an optimizer stepped since the sum began.
            GradientsChanged: ``loss.backward()``, ``zero_grad()`` or clipping beside this method.
        """
        n = whole_number(n)
        if self._is_sent:
            self._begin()
        if not self._num_passes:  # the server's parameters may have been loaded since
            self._parameters_before = self._parameter_versions()
        self._check_untouched()
        reduction = watch(loss_sum)
        loss_sum.backward()  # type: ignore[no-untyped-call]
        if n and reduction.is_mean(n):
            raise MeanLeftIn(
                f"expected a loss that is summed over its n = {n} examples, found a mean with the "
                f"factor {sum(reduction.means):.4g}: the gradients would be too small by about "
                f"{n / sum(reduction.means):.4g} times"
            )
        if n:  # of a loss without weight no factor follows from n
            self._note_reduction(reduction, n)
        self.weight += n
        self._num_passes += 1
        self._gradients_before = self._accumulator.num_changes

    def tensors(self) -> dict[str, Tensor]:
        """Return each trainable parameter's summed gradient by its name, as views of the vector.

        The sum of a parameter that no backward pass has reached is zero.

        Raises:
            EmptyUpdate: ``backward`` was never called.
            MeanLeftIn, CountsDisagree, ParametersChanged, GradientsChanged: see ``backward``.
        """
        self._check_untouched()
        self._check_counts()
        slots, spans = self._image.layout.trainable, self._image.layout.spans
        return {
            slot.name: self._accumulator.values_P[start:end].view(slot.shape)
            for slot, (start, end) in zip(slots, spans, strict=True)
        }

    def reply(self, message: Message, metrics: Mapping[str, float] | None = None) -> Message:
        """Return the reply to a Flower message: the sums, their weight and layout, and the metrics.

        The sum ends with it: the next ``backward`` begins another.

        Raises:
            OtherParameters: the gradients are not those of the parameters in the message.
            EmptyUpdate, MeanLeftIn, CountsDisagree, ParametersChanged, GradientsChanged: see
                ``tensors``.
        """
        arrays = ArrayRecord(self.tensors())
        named = dict(self._image.model.named_parameters())
        check_received(
            {slot.name: named[slot.name] for slot in self._image.layout.trainable}, message
        )
        self._hook.remove()
        content = reply_content(
            arrays,
            MetricRecord(dict(metrics or {})),
            layout=self._image.layout.digest,
            weight=self.weight,
            num_passes=self._num_passes,
            is_reduction_seen=self._is_reduction_seen,
            unused=self._accumulator.unused(),
        )
        self._is_sent = True
        return Message(content, reply_to=message)

    def _check_untouched(self) -> None:
        if self._parameter_versions() != self._parameters_before:
            raise ParametersChanged(
                "expected the parameters that the server sent, found that they changed while "
                "their gradients were summed (an optimizer's step, or load_state_dict)"
            )
        found = "expected sums that only sums.backward(loss_sum, n) adds to, found that"
        try:
            self._accumulator.check_views()
        except TaskError:
            raise GradientsChanged(
                f"{found} the gradients were replaced (zero_grad), and the sum so far is lost"
            ) from None
        if self._accumulator.num_changes != self._gradients_before:
            raise GradientsChanged(
                f"{found} something else wrote to the gradients (loss.backward, zero_grad or "
                f"clipping)"
            )

    def _check_counts(self) -> None:
        if not self._num_passes:
            raise EmptyUpdate(
                "sums.backward(loss_sum, n) was never called: there is nothing to send",
                remedy="call it for each batch; a client without examples should not reply",
            )
        if self._has_rows and self._most_rows > 1 and self.weight == self._num_passes:
            raise CountsDisagree(
                f"expected the number of examples, found 1 in each of {self._num_passes} calls of "
                f"sums.backward, while the model took up to {self._most_rows} rows at once, and "
                f"returned as many: these are batches",
                remedy=f"{CountsDisagree.remedy}. If the rows are the steps of one sequence, count "
                f"the steps that the loss sums over, or pass it as a batch: x.unsqueeze(0)",
            )
        if (wrong := self._factors.wrong(self._num_passes)) is not None:
            raise MeanLeftIn(
                f"expected sums over the examples, found that each loss was {wrong}",
                remedy="pass the sum itself, sums.backward(criterion(outputs, labels), "
                "len(labels)); a constant factor belongs into the server's learning rate",
            )

    def _note_reduction(self, reduction: LossReduction, n: int) -> None:
        self._factors.add(reduction.factor, n)
        if self._is_reduction_seen and not reduction.is_seen:
            self._is_reduction_seen = False
            log.warning(
                "sums.backward cannot see in autograd's graph that the loss is a sum over its n "
                "examples; if it can return one loss per example, pass losses.sum()"
            )

    def _note_rows(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note the rows that the model takes in training: as a rule the batch's size.

        They are no examples if the output has another number of rows: one class for a sequence.
        """
        if torch.is_grad_enabled():
            given, returned = _num_rows([*args, *kwargs.values()]), _num_rows(output)
            self._most_rows = max(self._most_rows, given or 1)
            self._has_rows &= returned is None or returned == given

    def _parameter_versions(self) -> list[int]:
        return [parameter._version for parameter in self._image.trainable()]


def check_received(parameters: Mapping[str, Tensor], message: Message) -> None:
    """Check that these trainable parameters are those of the message.

    Raises:
        OtherParameters: the message has other values, or lacks one of them.
    """
    names = parameters.keys()
    records = [it for it in message.content.array_records.values() if names <= it.keys()]
    if not records:
        raise OtherParameters(
            f"expected an ArrayRecord with the model's {len(names)} trainable parameters in "
            f"the message, found none: the gradients cannot be those of the server's model",
            remedy="start the strategy from ArrayRecord(model.state_dict()) of the same model",
        )
    other = [
        name
        for name in sorted(names)
        if not torch.equal(parameters[name], torch.from_numpy(records[0][name].numpy().copy()))
    ]
    if other:
        raise OtherParameters(
            f"expected gradients at the parameters that the server sent, found other values "
            f"of {', '.join(other[:5])} (a head restored from context.state, or other weights "
            f"loaded before GradientSum)"
        )


class _SumFactors:
    """Whether the factors of the summed losses follow the sizes, or the number, of the batches.

    One loss of n = 2 with the factor 1/2 may be half a squared error; factors that follow batches
    of different sizes, or that match a larger batch exactly, are no constants.
    """

    def __init__(self) -> None:
        self._sizes: set[int] = set()
        self._constant: float | None = None
        self._is_divided = self._is_multiplied = self._is_constant = True

    def add(self, factor: float | None, n: int) -> None:
        """Note a loss's factor; None if it has none."""
        if self._constant is None:
            self._constant = factor
        self._is_constant &= factor is not None and factor == self._constant
        if n > 1 and (self._is_divided or self._is_multiplied):
            self._sizes.add(n)
            self._is_divided &= factor is not None and _is_close(factor * n)
            self._is_multiplied &= factor is not None and _is_close(factor / n)

    def wrong(self, num_passes: int) -> str | None:
        """Return what was done to each loss, or None if they are sums."""
        if self._sizes and self._sizes != {2}:
            if self._is_divided:
                return "divided by the n of its batch"
            if self._is_multiplied:
                return "multiplied by the n of its batch"
        if num_passes > 2 and self._is_constant and _is_close((self._constant or 0) * num_passes):
            return f"divided by the number of batches, {num_passes}"
        return None


def _num_rows(values: Any) -> int | None:
    """Return the rows of the first tensor that is no scalar; None if there is none."""
    if isinstance(values, Tensor):
        return len(values) if values.dim() else None
    if isinstance(values, Mapping):
        values = values.values()
    elif not isinstance(values, list | tuple):
        return None
    return next((rows for one in values if (rows := _num_rows(one)) is not None), None)


def _is_close(ratio: float) -> bool:
    return abs(ratio - 1) < 1e-3


def whole_number(n: int, *, least: int = 0) -> int:
    """Return a number of examples, or of what the loss was summed over: 0 if all are ignored.

    Raises:
        CountsDisagree: it is no whole number from ``least``.
    """
    try:
        whole = operator.index(n)
    except TypeError:
        whole = -1
    if whole < least:
        raise CountsDisagree(
            f"expected n, the examples (or tokens) that the loss was summed over, as a whole "
            f"number from {least}, found {n!r:.40}"
        )
    return whole
