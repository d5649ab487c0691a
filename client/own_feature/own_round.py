"""Lets a feature of the user's act on a round, and keeps its state from round to round.

A round's state is pending until the server says that the round counted, as is the sampler's
position.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from headwater.client.own_feature.device_feature import DeviceFeature, DeviceWork
from headwater.client.training.round import Feature, Work
from headwater.common.errors import (
    CorruptUpdate,
    FeatureMissing,
    HeadwaterError,
    MaskingTooWeak,
    ProtocolMismatch,
    StateError,
    TaskError,
)
from headwater.common.messages import Plan
from headwater.common.model.local_state import LocalStore
from headwater.common.own_feature.found import OwnFeature, keeps_state, own_features
from headwater.common.parsed_text import json_of
from headwater.common.settings.training import FeatureSettings
from headwater.common.sums.named_sums import named_sums
from headwater.common.user_code.failures import running

REMEDY = "correct the lines that are shown in the feature's class Device"
PENDING = "."
"""Begins the names of pending tensors; a feature's own names begin otherwise."""


def own_rounds(
    plan: Plan, chosen: FeatureSettings, store: Callable[[str], LocalStore | None]
) -> list[OwnRound]:
    """Return what the device's own features do in a plan that asks for them, in their order.

    ``store`` gives the place of a feature's state.

    Raises:
        SettingsError: there is no such feature.
        FeatureMissing: the plan asks nothing of one, and the device requires that.
        TaskFailed: its class raised.
    """
    found = (_own_round(one, plan, store(f"feature.{one.name}")) for one in own_features(chosen))
    return [one for one in found if one is not None]


def _own_round(found: OwnFeature, plan: Plan, store: LocalStore | None) -> OwnRound | None:
    if found.device is None:
        return None
    what, terms = f"the feature {found.name}", plan.terms.get(found.name)
    if terms is None:
        if getattr(found.device, "is_required", False):
            raise FeatureMissing(
                f"{what} is required on this device, and the plan of round {plan.round} asks for "
                "nothing of it",
                remedy="start the server with the same --feature",
            )
        _settle(store, plan.counted_round)
        return None
    with running(what, remedy=REMEDY):
        # In one process all clients are sent one object.
        device = found.device(terms.model_copy(deep=True))
    return OwnRound(device, plan, store, what=what)


def check_test(chosen: FeatureSettings) -> None:
    """Check that the device may tell how well a model does on its held-out examples.

    Raises:
        SettingsError: there is no such feature.
        FeatureMissing: the device requires a feature, which does not act on a test.
    """
    for found in own_features(chosen):
        if getattr(found.device, "is_required", False):
            raise FeatureMissing(
                f"the feature {found.name} is required on this device, and acts on updates alone: "
                "the device tests no model",
                remedy="start the server without --evaluate-on-devices",
            )


class OwnRound(Feature):
    """One round of a feature of the user's."""

    def __init__(
        self, device: DeviceFeature, plan: Plan, store: LocalStore | None, *, what: str
    ) -> None:
        self._device, self._plan, self._store, self._what = device, plan, store, what
        self._before: dict[str, Tensor] = {}

    def prepare(self, work: Work) -> None:
        """Begin the round with the state that counts.

        Raises:
            ProtocolMismatch: its sums would be in clear, in a plan that hides the device's data, or
                without noise where the model's sum has some.
            StateError: the state cannot be read.
        """
        terms = self._device.terms
        is_masked = self._plan.keeps_update
        is_hidden = self._plan.hides_data or self._plan.hides_pace
        num_values = work.context.image.layout.num_parameters
        has_sums = bool(named_sums([terms], num_values).of)
        if has_sums and (self._plan.is_private or (is_hidden and not is_masked)):
            raise ProtocolMismatch(
                f"{work.context.name}: {self._what} asks for sums without noise, in a plan that "
                "is private",
                remedy="start the server without the feature, or without privacy",
            )
        if self._plan.uses_whole_window:
            raise ProtocolMismatch(
                f"{work.context.name}: {self._what} may change what each example adds, in a plan "
                "whose noise is for single examples",
                remedy="start the server without the feature, or with --privacy-unit device",
            )
        self._before = _settled(self._store, self._plan.counted_round)
        self._device.state = {name: tensor.clone() for name, tensor in self._before.items()}
        with running(self._what, remedy=REMEDY):
            self._device.begin(DeviceWork(work))

    def direction(self, work: Work, mean_P: Tensor) -> None:
        with running(self._what, remedy=REMEDY):
            self._device.direction(DeviceWork(work), mean_P)

    def sums(self, work: Work) -> Mapping[str, Tensor]:
        with running(self._what, remedy=REMEDY):
            self._device.end(DeviceWork(work))
        for name, one in {**self._device.sums}.items():
            if not isinstance(one, Tensor):
                raise TaskError(
                    f"{self._what} sets sums[{name!r}] to {type(one).__name__}: a sum is a tensor",
                    remedy="use torch.tensor([...])",
                )
        for name, one in {**self._device.state}.items():
            if not isinstance(one, Tensor) or name.startswith(PENDING):
                raise TaskError(
                    f"{self._what} sets state[{name!r}] to {type(one).__name__}: a state has "
                    "tensors, under names that begin with no dot",
                    remedy="keep numbers as torch.tensor(number)",
                )
        self._check_sums(work)
        return self._device.sums

    def _check_sums(self, work: Work) -> None:
        """Check that the sums are those that the terms declare.

        Raises:
            TaskError: they are not, which the next round would be too.
            NonFiniteUpdate, OutlierUpdate: one is not finite, or beyond its limit.
        """
        num_values = work.context.image.layout.num_parameters
        asked = named_sums([self._device.terms], num_values)
        try:
            asked.joined(self._device.sums, name=work.context.name)
        except CorruptUpdate as error:
            raise TaskError(f"{self._what}: {error.message}", remedy=error.remedy) from None

    def check_stateless(self, name: str) -> None:
        """Check that the feature keeps no state: by its class, and after a round by what it left.

        ``name`` is the device's. A server that chooses models could have one member bring what it
        keeps of many rounds into a session, and the others nothing.

        Raises:
            MaskingTooWeak: it does.
        """
        if self._before or self._device.state or keeps_state(type(self._device)):
            raise MaskingTooWeak(
                f"{name}, round {self._plan.round}: {self._what} keeps a state on this device, "
                "which would enter its updates, and it requires masks that withstand a server that "
                "lies",
                remedy="use --secure-aggregation semi-honest, or a feature without a state",
            )

    def keep(self) -> None:
        """Store the state as that of a round which may count.

        Raises:
            StateError: it cannot be written.
        """
        state = self._device.state
        if self._store is not None and (state or self._before):
            pending = {PENDING + name: tensor.detach().clone() for name, tensor in state.items()}
            _write(self._store, {**self._before, **pending}, pending_round=self._plan.round)


def _settle(store: LocalStore | None, counted_round: int | None) -> None:
    """Settle the state at a plan without the feature: the next one may count another round.

    Raises:
        StateError: it cannot be read or written.
    """
    if store is not None and store.load_bytes() is not None:
        _write(store, _settled(store, counted_round), pending_round=None)


def _write(store: LocalStore, tensors: Mapping[str, Tensor], *, pending_round: int | None) -> None:
    from safetensors.torch import save  # most devices keep nothing

    plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
    try:
        store.save_bytes(save(plain, {"pending_round": json.dumps(pending_round)}))
    except (OSError, ValueError) as error:
        raise StateError(f"{store.where} cannot be written: {error}") from error


def _settled(store: LocalStore | None, counted_round: int | None) -> dict[str, Tensor]:
    """Return the state with the pending round's, if that round was counted."""
    data = None if store is None else store.load_bytes()
    if store is None or data is None:
        return {}
    from safetensors.torch import load

    try:
        header: Any = json_of(data[8 : 8 + int.from_bytes(data[:8], "little")])
        pending_round = json_of(header["__metadata__"]["pending_round"])
        tensors = load(data)
    except Exception as error:
        if isinstance(error, HeadwaterError):
            raise
        raise StateError(
            f"{store.where} is damaged: {error}", remedy="delete it: the feature begins anew"
        ) from error
    is_counted = pending_round is not None and pending_round == counted_round
    return {
        name.removeprefix(PENDING): tensor
        for name, tensor in tensors.items()
        if name.startswith(PENDING) == is_counted
    }
