"""A Flower strategy for existing Flower apps: ``FedAvg`` that adds gradients instead of models.

Sampling, configuration and evaluation are FedAvg's. A reply's ArrayRecord holds the *sum* of each
trainable parameter's gradients under the parameter's name (``client.flower.gradient_sum`` makes
it), and its MetricRecord the weight that they were summed over. The strategy adds the sums in
64-bit integers, divides once and takes one step of any ``torch.optim`` optimizer; frozen parameters
and buffers pass through unchanged. Replies are added one by one as they arrive.

A hostile client can send any finite sums and weight. Only a reply's length decides how much memory
is allocated; a reply that does not fit is left out, logged and counted.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from numpy.typing import NDArray
from torch import nn

from headwater.common.errors import (
    CorruptUpdate,
    CountOutOfRange,
    ModelMismatch,
    SettingsError,
    UpdateRefused,
)
from headwater.common.model.parameters import ModelImage, Slot
from headwater.common.settings import schema as settings
from headwater.common.settings.fields import Scalar
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.aggregation.server_optimizer import ServerOptimizer

log = logging.getLogger(__name__)

MAX_WEIGHT = 2**53  # the largest count that a float, Flower's metric type, holds exactly
FIRST_WEIGHT = 2**10  # a client's assumed weight, which fixes the sum's scale
NUM_REFUSED = "num-refused"

MetricsAggregation = Callable[[list[RecordDict], str], MetricRecord]


class SumOfGradients(FedAvg):
    """Takes one step of ``optimizer`` per round: the sum of gradients over the sum of weights.

    ``model`` is moved into the strategy's memory and holds the current parameters from then on. A
    round's metrics are FedAvg's, plus the total weight and the number of refused replies.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: str = "sgd",
        learning_rate: float = 0.1,
        optimizer_arguments: Mapping[str, Scalar] | None = None,
        schedule: settings.ScheduleSettings | None = None,
        fraction_train: float = 1.0,
        fraction_evaluate: float = 1.0,
        min_train_nodes: int = 2,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: MetricsAggregation | None = None,
        evaluate_metrics_aggr_fn: MetricsAggregation | None = None,
    ) -> None:
        """Make the model's flat layout and its optimizer; the other arguments are FedAvg's.

        Raises:
            BatchDependentLayer, UnsupportedModel: see ``ModelImage``.
            SettingsError: torch has no such optimizer, or the optimizer no such argument.
        """
        super().__init__(
            fraction_train=fraction_train,
            fraction_evaluate=fraction_evaluate,
            min_train_nodes=min_train_nodes,
            min_evaluate_nodes=min_evaluate_nodes,
            min_available_nodes=min_available_nodes,
            weighted_by_key=weighted_by_key,
            arrayrecord_key=arrayrecord_key,
            configrecord_key=configrecord_key,
            train_metrics_aggr_fn=train_metrics_aggr_fn,
            evaluate_metrics_aggr_fn=evaluate_metrics_aggr_fn,
        )
        if schedule is not None and schedule.batch_scaling != "none":
            raise SettingsError(
                f"batch_scaling = {schedule.batch_scaling!r} needs a planned effective batch, and "
                f"Flower's strategies plan none",
                remedy="leave it out, or train with headwater-server",
            )
        self._image = ModelImage(model)
        self._sum = CohortSum(self._image.layout)
        self._optimizer = ServerOptimizer(
            self._image,
            settings.OptimizerSettings(
                name=optimizer,
                learning_rate=learning_rate,
                arguments=dict(optimizer_arguments or {}),
            ),
            schedule or settings.ScheduleSettings(),
        )
        self._values_P = torch.zeros(self._image.layout.num_parameters)
        self._sent: ArrayRecord | None = None
        self._num_invited = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Load the arrays unless the last step made them, and invite clients as FedAvg does.

        Raises:
            ModelMismatch: the arrays do not fit the model.
        """
        if arrays is not self._sent:
            try:
                self._image.model.load_state_dict(arrays.to_torch_state_dict())
            except RuntimeError as error:
                raise ModelMismatch(
                    f"the arrays do not fit the strategy's model: {error}",
                    remedy="start from ArrayRecord(model.state_dict()) of the same model",
                ) from error
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._num_invited = len(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the replies, divide once and take one step; (None, None) if no reply was accepted.

        The same replies give the same bits in any order.
        """
        self._sum.open(
            num_clients=self._num_invited, planned_weight=self._num_invited * FIRST_WEIGHT
        )
        metrics: list[MetricRecord] = []
        num_refused = 0
        for reply in replies:
            name = f"node {reply.metadata.src_node_id}, round {server_round}"
            try:
                metrics.append(self._fold(reply, name))
            except UpdateRefused as error:
                num_refused += 1
                log.warning("left out: %s: %s", error.code, error)
        if not metrics:
            log.warning("round %d: no reply was accepted, the model is unchanged", server_round)
            return None, None
        weight = self._sum.weight
        self._optimizer.step(self._sum.close())
        self._sent = ArrayRecord(self._image.model.state_dict())
        means = self._mean_metrics(metrics)
        means[self.weighted_by_key], means[NUM_REFUSED] = weight, num_refused
        return self._sent, means

    def _fold(self, reply: Message, name: str) -> MetricRecord:
        """Check a reply as a whole, then add it; return its metrics.

        Raises:
            UpdateRefused: the reply is invalid; nothing of it was added.
        """
        if reply.has_error():
            raise UpdateRefused(f"{name}: the client failed: {(reply.error.reason or '')[:500]}")
        arrays, metrics = reply.content.array_records, reply.content.metric_records
        if len(arrays) != 1 or len(metrics) != 1:
            raise CorruptUpdate(
                f"{name}: expected one ArrayRecord and one MetricRecord, found {len(arrays)} and "
                f"{len(metrics)}"
            )
        (metric_record,) = metrics.values()
        weight = _weight(metric_record, self.weighted_by_key, name)
        self._read(next(iter(arrays.values())), name)
        self._sum.check(self._values_P, name=name)
        self._sum.fold(self._values_P, weight)
        return metric_record

    def _read(self, arrays: ArrayRecord, name: str) -> None:
        """Copy a reply's sums into the flat vector."""
        slots = self._image.layout.trainable
        unexpected = sorted(arrays.keys() ^ {slot.name for slot in slots})
        if unexpected:
            raise CorruptUpdate(
                f"{name}: the reply's array names differ from the trainable parameters' names: "
                f"{', '.join(unexpected[:5])}",
                remedy="reply with GradientSum(model).tensors(), not with the state_dict",
            )
        for slot, (start, end) in zip(slots, self._image.layout.spans, strict=True):
            self._values_P.numpy()[start:end] = _float32_of(arrays[slot.name], slot, name)

    def _mean_metrics(self, metrics: list[MetricRecord]) -> MetricRecord:
        """Return FedAvg's average of the metrics that all replies have; log the other metrics."""
        common = set.intersection(*(set(record) for record in metrics))
        for missing in sorted(set().union(*metrics) - common):
            log.warning("the metric %s is left out, because some replies lack it", missing)
        contents = [
            RecordDict({"metrics": MetricRecord({key: record[key] for key in sorted(common)})})
            for record in metrics
        ]
        return self.train_metrics_aggr_fn(contents, self.weighted_by_key)


def _weight(metrics: MetricRecord, key: str, name: str) -> int:
    """Return a reply's weight.

    Raises:
        CorruptUpdate: a metric is a list, NaN or infinite.
        CountOutOfRange: the weight is missing or not an integer from 1 to 2^53.
    """
    for metric, value in metrics.items():
        if isinstance(value, list) or not math.isfinite(value):
            raise CorruptUpdate(f"{name}: the metric {metric} must be finite, found {value!r:.80}")
    weight = metrics.get(key)
    if weight is None or isinstance(weight, list) or not 1 <= weight <= MAX_WEIGHT or weight % 1:
        raise CountOutOfRange(
            f"{name}: {key} must be the weight that the loss was summed over, 1 or more, found "
            f"{weight!r}"
        )
    return int(weight)


def _float32_of(array: Array, slot: Slot, name: str) -> NDArray[np.float32]:
    """Return an array's elements [n], as a view of its bytes.

    The header of ``numpy.save`` is compared, not parsed, so that a reply cannot decide what is
    allocated or evaluated.

    Raises:
        CorruptUpdate: it is not float32 of the parameter's shape in C order.
    """
    start = 10 + int.from_bytes(array.data[8:10], "little")
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {slot.shape!r}, }}"
    fits = (
        array.data[:8] == b"\x93NUMPY\x01\x00"
        and array.data[10:start].strip() == header.encode()
        and len(array.data) - start == 4 * slot.num_elements
    )
    if not fits:
        raise CorruptUpdate(
            f"{name}: {slot.name} must be float32 {slot.shape} in C order, found {array.dtype} "
            f"{array.shape} in {len(array.data):,} bytes"
        )
    return np.frombuffer(array.data, dtype="<f4", offset=start)
