"""A Flower strategy for existing Flower apps: ``FedAvg`` that adds gradients instead of models.

Sampling, configuration and evaluation are FedAvg's. Each reply is made by ``GradientSum.reply``:
the *sum* of each trainable parameter's gradients, tagged with the weight that they were summed
over. The strategy adds the sums in 64-bit integers, divides once and takes one step of any
``torch.optim`` optimizer; frozen parameters and buffers pass through unchanged. If the run starts
from the trainable parameters alone, no round sends the others. Replies are added one by one as they
arrive.

A reply that does not fit is left out, logged by name and counted. If no reply of the first rounds
fits, the app is converted wrongly, and the run ends with the first refusal.
"""

from __future__ import annotations

import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from torch import Tensor, nn

from headwater.common.errors import (
    EmptyUpdate,
    HeadwaterError,
    ModelMismatch,
    SettingsError,
    StrategyWrapped,
    UpdateRefused,
)
from headwater.common.model.local_parameters import by_all_names
from headwater.common.model.mismatch import first_difference, rows_of
from headwater.common.model.parameters import ModelImage
from headwater.common.model.tensor_file import load_tensors, tensors_of
from headwater.common.model.vectors import zero_tensors
from headwater.common.settings import schema as settings
from headwater.common.settings.fields import Scalar
from headwater.common.system.printable import printable, printable_name
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.aggregation.round_reports import in_all
from headwater.server.aggregation.server_optimizer import ServerOptimizer
from headwater.server.flower.gradient_replies import ReplyReader

log = logging.getLogger("flwr.headwater")  # Flower shows what its own logger's children say

FIRST_WEIGHT = 2**10  # a client's assumed weight, which fixes the sum's scale
NUM_REFUSED = "num-refused"
CLIENT_RATES = ("lr", "learning-rate", "learning_rate")
WRAPPERS = (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyClientSideFixedClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
)

MetricsAggregation = Callable[[list[RecordDict], str], MetricRecord]


class SumOfGradients(FedAvg):
    """Takes one step of ``optimizer`` per round: the sum of gradients over the sum of weights.

    ``model`` is moved into the strategy's memory and holds the current parameters from then on. A
    round's metrics are FedAvg's, plus the total weight and the number of refused replies.

    The learning rate is that of one step on all clients' examples. A rate that suits FedAvg's
    clients, which take many steps a round, does not carry over; Adam depends least on it.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: str | None = None,
        learning_rate: float | None = None,
        optimizer_arguments: Mapping[str, Scalar] | None = None,
        schedule: settings.ScheduleSettings | None = None,
        local_training: bool = False,
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

        With ``local_training`` clients take optimizer steps of their own and reply by
        ``ModelDifference``. The optimizer is then SGD at a rate of 1, which is FedAvg; without, it
        is Adam at 0.01.

        Raises:
            BatchDependentLayer, UnsupportedModel: see ``ModelImage``.
            SettingsError: torch has no such optimizer, the optimizer no such argument, or it keeps
                other weights than it steps.
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
        chosen = settings.OptimizerSettings(
            name=optimizer, learning_rate=learning_rate, arguments=dict(optimizer_arguments or {})
        ).with_local_steps(settings.LocalSettings(steps=2 if local_training else 1))
        self._optimizer_name, self._trains_locally = chosen.kind, local_training
        self._optimizer = ServerOptimizer(
            self._image, chosen, schedule or settings.ScheduleSettings()
        )
        if self._optimizer.keeps_others:
            raise SettingsError(
                f"{chosen.kind} steps some weights and keeps others (it has train and eval), and "
                "Flower's strategies return the stepped ones alone",
                remedy="train with headwater-server, which keeps what the optimizer says",
            )
        self._replies = ReplyReader(self._image, weighted_by_key, are_differences=local_training)
        self._sent: ArrayRecord | None = None
        self._sends_trained_alone = False
        self._num_invited = 0
        self._unused: list[Sequence[int]] = []
        """The parameters that each reply's losses did not use."""
        self._warned_of: set[str] = set()

    def summary(self) -> None:
        """Log FedAvg's summary, the server's step, and what to try for its learning rate.

        Raises:
            StrategyWrapped: see ``configure_train``.
        """
        self._refuse_wrapper()
        super().summary()
        if self._trains_locally:
            log.info(
                "\t└──> Differences of local training: one step of %s a round, at the learning "
                "rate %g, along their mean",
                self._optimizer_name,
                self._optimizer.learning_rate,
            )
            return
        log.info(
            "\t└──> Sums of gradients: one step of %s a round, at the learning rate %g, on the "
            "examples of all clients as one batch",
            self._optimizer_name,
            self._optimizer.learning_rate,
        )
        log.info(
            "\t\t└── A learning rate of FedAvg's clients does not carry over: they took many "
            "steps a round. Try adam at 0.01, 0.003 and 0.03 (fine-tuning: 0.0001), or sgd at 0.1, "
            "0.3 and 1, and more rounds than FedAvg had"
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Load the arrays unless the last step made them, and invite clients as FedAvg does.

        Raises:
            ModelMismatch: the arrays do not fit the model.
            StrategyWrapped: a wrapper of Flower's for differential privacy is around the strategy,
                or something changed the arrays since the last step.
        """
        self._refuse_wrapper()
        if arrays is not self._sent:
            before = self._image.bytes_U8.clone() if self._sent and server_round > 1 else None
            state, model = arrays.to_torch_state_dict(), self._image.model
            trained = {slot.name for slot in self._image.layout.trainable}
            self._sends_trained_alone = state.keys() == trained != tensors_of(model).keys()
            whole: Mapping[str, Tensor] = state
            if self._sends_trained_alone:
                whole = {**tensors_of(model), **by_all_names(model, state)}
            try:
                load_tensors(model, whole)
            except RuntimeError as error:
                difference = first_difference(
                    rows_of(tensors_of(model)),
                    rows_of(state),
                    here="the model",
                    there="the arrays",
                )
                raise ModelMismatch(
                    f"the arrays do not fit the strategy's model: {difference}",
                    remedy="start from ArrayRecord(model.state_dict()) of the same model",
                ) from error
            if before is not None and not before.equal(self._image.bytes_U8):
                raise StrategyWrapped(
                    f"round {server_round}: expected the arrays that the strategy's last step "
                    f"made, found other values (noise, a moving average, a model loaded again)",
                    remedy="leave the arrays alone between rounds; to set the model on purpose, "
                    "load it into the model that SumOfGradients was given, and return "
                    "ArrayRecord(model.state_dict()) from aggregate_train",
                )
        for key in CLIENT_RATES:
            if key in config and not self._trains_locally:
                self._warn_once(
                    f"the train_config has {key} = {config[key]!r}, which changes nothing: the "
                    f"clients take no step. The rate is SumOfGradients(learning_rate=..., "
                    f"schedule=...)"
                )
        messages = list(super().configure_train(server_round, arrays, config, grid))
        self._num_invited = len(messages)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Add the replies, divide once and take one step; (None, None) if no reply was accepted.

        The same replies give the same bits in any order.

        Raises:
            HeadwaterError: no reply was accepted in this round or before, and this is the first
                refusal that is the app's fault.
        """
        self._sum.open(
            num_clients=self._num_invited, planned_weight=self._num_invited * FIRST_WEIGHT
        )
        self._unused = []
        metrics: list[MetricRecord] = []
        refused: list[HeadwaterError] = []
        for reply in replies:
            name = f"node {reply.metadata.src_node_id}, round {server_round}"
            try:
                metrics.append(self._fold(reply, name))
            except HeadwaterError as error:
                refused.append(error)
                log.warning("left out: %s: %s", error.code, printable(error))
        if not metrics:
            log.warning("round %d: no reply was accepted, the model is unchanged", server_round)
            self._end_if_converted_wrongly(refused)
            return None, None
        weight = self._sum.weight
        if not weight:
            log.warning(
                "round %d: the examples of all replies weigh 0 together, the model is unchanged",
                server_round,
            )
            return None, None
        mean_P = self._sum.close()
        unused = zero_tensors(mean_P, self._image.layout.spans, in_all(self._unused))
        self._optimizer.step(mean_P, unused=unused)
        self._sent = self._arrays()
        means = self._mean_metrics(metrics)
        means[self.weighted_by_key], means[NUM_REFUSED] = weight, len(refused)
        return self._sent, means

    def _arrays(self) -> ArrayRecord:
        """Return the model as the next round sends it: whole, or the trained parameters alone."""
        image = self._image
        if not self._sends_trained_alone:
            return ArrayRecord(OrderedDict(tensors_of(image.model)))
        slots = image.layout.trainable
        return ArrayRecord({slot.name: slot.view_of(image.bytes_U8) for slot in slots})

    def _fold(self, reply: Message, name: str) -> MetricRecord:
        """Check a reply as a whole, then add it; return its metrics, with the weight among them.

        Raises:
            HeadwaterError: see ``ReplyReader.read``; nothing of the reply was added.
        """
        metrics, tag = self._replies.read(reply, name)
        self._sum.check(self._replies.values_P, name=name)
        self._sum.fold(self._replies.values_P, tag.weight)
        self._unused.append(tag.unused)
        return MetricRecord({**metrics, self.weighted_by_key: tag.weight})

    def _end_if_converted_wrongly(self, refused: list[HeadwaterError]) -> None:
        """Raise the first refusal that is the app's own fault, if no round has had a step yet."""
        if self._sent is None:
            for error in refused:
                if isinstance(error, EmptyUpdate) or not isinstance(error, UpdateRefused):
                    raise error

    def _refuse_wrapper(self) -> None:
        """Refuse Flower's wrappers for differential privacy.

        A wrapper calls the strategy that it holds and leaves no trace in it, so its call is looked
        for on the stack.
        """
        frame = sys._getframe(1)
        while frame.f_back is not None:
            frame = frame.f_back
            caller = frame.f_locals.get("self")
            if isinstance(caller, WRAPPERS) and caller.strategy is self:
                raise StrategyWrapped(
                    f"expected SumOfGradients as the run's strategy, found {type(caller).__name__} "
                    f"around it, which clips the distance between a reply and the model and adds "
                    f"noise to the model: a sum of gradients is no model"
                )

    def _warn_once(self, text: str) -> None:
        if text not in self._warned_of:
            self._warned_of.add(text)
            log.warning("%s", printable(text))

    def _mean_metrics(self, metrics: list[MetricRecord]) -> MetricRecord:
        """Return FedAvg's average of the metrics that all replies have; log the other metrics."""
        common = set.intersection(*(set(record) for record in metrics))
        for missing in sorted(set().union(*metrics) - common):
            log.warning(
                "the metric %s is left out, because some replies lack it", printable_name(missing)
            )
        contents = [
            RecordDict({"metrics": MetricRecord({key: record[key] for key in sorted(common)})})
            for record in metrics
        ]
        return self.train_metrics_aggr_fn(contents, self.weighted_by_key)
