"""A run's differential privacy: the terms of its rounds, the noise of plain sums, and the spending.

In a plain round the server adds the noise: devices must trust it, and are protected from each
other and from whoever sees the model. Under masks the devices add the noise, and the server sees
the sum with its noise alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from headwater.common.errors import PrivacySpent
from headwater.common.messages import Plan
from headwater.common.privacy.clip_bit import bit_sigma, bit_steps
from headwater.common.privacy.discrete_gaussian import RandomBits, draw
from headwater.common.privacy.noise_shares import (
    FLOAT32_ROUNDING,
    opened_multiplier,
    plain_scale_bits,
    plain_sigma,
    statistics_sigma,
)
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.settings.rounds import PrivacyUnit
from headwater.common.settings.schema import Settings
from headwater.server.aggregation.cohort_sum import CohortSum
from headwater.server.aggregation.extra_sums import ExtraSums
from headwater.server.planning.device_estimates import told
from headwater.server.privacy.accountant import (
    Accountant,
    epsilon_of,
    largest_rho,
    multiplier_of,
    multiplier_of_rest,
)
from headwater.server.privacy.affordable_noise import AffordableNoise
from headwater.server.privacy.banded_noise import BandedNoise, banded_noise
from headwater.server.privacy.clip_norm import ClipNorm
from headwater.server.privacy.example_epochs import NOBODY, ExampleEpochs, Share
from headwater.server.privacy.round_terms import round_terms
from headwater.server.privacy.settings_check import check_bands
from headwater.server.privacy.spent_budget import (
    read_banded,
    read_epochs,
    read_events,
    write_events,
)
from headwater.server.secagg.unmask_phase import UnmaskedSum


class RunPrivacy:
    """The privacy of one run."""

    def __init__(
        self,
        settings: Settings,
        *,
        num_values: int,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Start with nothing spent; ``random`` keys the noise of plain sums.

        Raises:
            SettingsError: dp-accounting is not installed.
        """
        self._settings = settings
        self._num_values = num_values
        self._random = random
        chosen = settings.privacy
        self._accountant = Accountant(chosen.delta)
        self.clip = ClipNorm.of(chosen)
        """The clip norm of the next round; the caller keeps it in the checkpoint."""
        self._least_of_round: float | None = None
        """The least noise multiplier of the current round's opened sums; None before the first."""
        self._gain = 1.0
        """How much less the last opened sum cost than its terms say; see ``note_unmasked``."""
        self._rho: float | None = None
        """The zCDP that all rounds may spend together; None where the noise is set."""
        if chosen.epsilon is not None:
            self._rho = largest_rho(chosen.epsilon, delta=chosen.delta)
        self._epochs: ExampleEpochs | None = None
        """How far the devices are in their epochs; None where every round counts."""
        if chosen.unit == "example" and settings.secure.aggregation == "off":
            self._epochs = NOBODY
        self._affordable: AffordableNoise | None = None
        """What the devices afford where the noise follows an epsilon for each example."""
        if self._epochs is not None and self._rho is not None:
            min_clients = settings.cohort.min_clients
            self._affordable = AffordableNoise(
                self._rho, num_rounds=self._rounds_from(1), min_clients=min_clients
            )
        self._banded: BandedNoise | None = None
        """The noise that is correlated over rounds; None where each round's is independent."""
        if chosen.bands > 1:
            self._banded = self._open_banded(None, num_rounds=0)
        self._shares: Mapping[str, Share] = {}
        """The devices' parts of the current round."""
        self.publish: Callable[[], None] = lambda: None
        """Called when it is stored that a sum was opened, before the sum is used."""

    @property
    def epsilon(self) -> float:
        """The epsilon of all sums that were opened so far."""
        if self._epochs is None:
            return self._accountant.epsilon
        return epsilon_of(self._epochs.most, delta=self.delta)

    @property
    def delta(self) -> float:
        """The delta that the epsilon holds at."""
        return self._accountant.delta

    @property
    def unit(self) -> PrivacyUnit:
        """What the epsilon is for."""
        return self._settings.privacy.unit

    @property
    def last_multiplier(self) -> float | None:
        """The noise multiplier of the last opened sum."""
        return self._accountant.events[-1][0] if self._accountant.events else None

    def open_file(self, *, num_rounds: int = 0) -> None:
        """Read what the run has spent, from its folder; ``num_rounds`` are in its checkpoint.

        Raises:
            CheckpointCorrupt: see ``read_events``, ``BandedNoise.restore``.
            SettingsError: see ``check_bands``, ``banded_noise``.
        """
        folder, delta = self._settings.out, self._settings.privacy.delta
        saved = read_banded(folder)
        check_bands(self._settings.privacy, has_sums=num_rounds > 0, is_banded=saved is not None)
        if saved is not None:
            self._banded = self._open_banded(saved, num_rounds=num_rounds)
            self._accountant = Accountant(delta, self._banded.events)
            return
        events = read_events(folder, num_rounds=num_rounds)
        self._accountant = Accountant(delta, events)
        if self._epochs is not None and events:
            self._epochs = read_epochs(folder)

    def _open_banded(self, saved: Mapping[str, Any] | None, *, num_rounds: int) -> BandedNoise:
        return banded_noise(
            self._settings.privacy,
            rho=self._rho,
            rounds=self._settings.num_rounds,
            saved=saved,
            num_rounds=num_rounds,
            num_values=self._num_values,
            folder=self._settings.out,
            random=self._random,
        )

    def awaited(self) -> Callable[[str], bool] | None:
        """Return which devices a round waits for; None: any."""
        if self._banded is None:
            return None
        needed = self._settings.cohort.min_clients
        return self._banded.awaited(seed=self._settings.seed, needed=needed)

    def due(self, names: Collection[str]) -> Sequence[str] | None:
        """Return the devices that may be in the next round, in the order of their turns.

        None if its noise is independent: all may be, in any order.

        Raises:
            PrivacySpent, TooFewClients: see ``BandedNoise.due``.
        """
        if self._banded is None:
            return None
        needed = self._settings.cohort.min_clients
        return self._banded.due(names, seed=self._settings.seed, needed=needed)

    def scale_bits(self, terms: PrivacyTerms) -> int:
        """Return f: a plain round's sum is made in steps of 2^-f.

        Raises:
            SettingsError: see ``BandedNoise.scale_bits``.
        """
        banded = self._banded
        return plain_scale_bits(terms) if banded is None else banded.scale_bits(terms)

    def noise_multiplier(self, *, round_number: int) -> float:
        """Return the noise of a round: as set, or what spends the rest of the epsilon evenly.

        It follows the sums that were really opened: one with more noise than planned leaves more
        for the others, and the sum of a round that a crash undid leaves less. Of the coming rounds
        as many devices are expected to survive as of the last one, so that the noise of all rounds
        is about the same; if fewer survive, the later rounds have more noise.

        Raises:
            PrivacySpent: nothing is left of the epsilon.
        """
        chosen = self._settings.privacy
        if self._banded is not None:
            return self._banded.multiplier
        if self._rho is None:
            assert chosen.noise_multiplier is not None
            return chosen.noise_multiplier
        try:
            return self._multiplier_of_rest(self._rho, round_number=round_number)
        except PrivacySpent as error:
            raise PrivacySpent(
                f"{error.message}: {self.epsilon:.3g} of {chosen.epsilon:g} at delta "
                f"{self.delta:g} for each {self.unit}"
            ) from error

    def _multiplier_of_rest(self, rho: float, *, round_number: int) -> float:
        """Return the noise that spends the rest of ``rho`` evenly over the remaining rounds."""
        rounds = self._rounds_from(round_number)
        if self._epochs is None or self._affordable is None:
            events = self._accountant.events
            return multiplier_of_rest(rho, events, rounds=rounds, gain=self._gain)
        return self._affordable.multiplier(
            self._shares, self._epochs, round_number=round_number, rounds=rounds
        )

    def _shares_of(
        self, plans: Mapping[str, Plan], owned: Mapping[str, int]
    ) -> Mapping[str, Share]:
        """Return the devices' parts of a round, without those that are left out of it."""
        shares = {
            name: Share(quota=plan.quota, num_owned=told(owned[name]))
            for name, plan in plans.items()
        }
        if self._epochs is None or self._affordable is None:
            return shares
        number = next(iter(plans.values())).round
        return self._affordable.without_irregular(
            shares, self._epochs, round_number=number, rounds=self._rounds_from(number)
        )

    def check_left(self, *, round_number: int) -> None:
        """Check that something is left for a round, if no device's place in its data decides that.

        Raises:
            PrivacySpent: nothing is left of the epsilon.
        """
        if self._epochs is None:
            self.noise_multiplier(round_number=round_number)

    def private_plans(
        self,
        plans: Mapping[str, Plan],
        *,
        max_weight_per_example: int,
        owned: Mapping[str, int],
    ) -> dict[str, Plan]:
        """Return the plans with the round's terms, which are the same for all devices.

        Devices that make the noise stronger for another number of examples are left out.
        ``owned`` are the numbers of examples that the devices have, or ``UNTOLD_EXAMPLES``.

        Raises:
            PrivacySpent: see ``noise_multiplier``.
        """
        if not plans:
            return dict(plans)
        self._least_of_round = None
        self._shares = self._shares_of(plans, owned)
        plans = {name: plans[name] for name in self._shares}
        round_number = next(iter(plans.values())).round
        terms = round_terms(
            plans.values(),
            self._settings,
            self.clip,
            noise_multiplier=self.noise_multiplier(round_number=round_number),
            max_weight_per_example=max_weight_per_example,
        )
        changed = {id(plan): plan.asking(terms) for plan in plans.values()}
        return {name: changed[id(plan)] for name, plan in plans.items()}

    def measuring_terms(
        self,
        plans: Mapping[str, Plan],
        *,
        example_bound: float,
        max_examples: int,
        owned: Mapping[str, int],
    ) -> PrivacyTerms:
        """Return the terms of a round of sums beside the model's, in the place of the plans' own.

        An example adds at most ``example_bound`` to all of them together, and a device has at most
        ``max_examples`` in them. ``plans`` are those of a round of gradients: what the epsilon is
        to leave for the rounds after this one.

        Raises:
            PrivacySpent: nothing is left of the epsilon.
        """
        first = next(iter(plans.values()))
        before = first.of(PrivacyTerms)
        assert before is not None
        shares, self._shares = (
            self._shares,
            {name: Share(quota=max_examples, num_owned=told(owned[name])) for name in plans},
        )
        multiplier = before.noise_multiplier
        if self._epochs is not None and self._rho is not None:
            left = self._epochs.affordable_beside(
                self._rho, rounds=self._rounds_from(first.round + 1), shares=shares
            )
            multiplier = multiplier_of(left, of=self._rho)
        bound = example_bound * max_examples * (1 + FLOAT32_ROUNDING * max_examples)
        return before.model_copy(
            update={
                "norm_bound": bound,
                "example_bound": example_bound if before.unit == "example" else None,
                "noise_multiplier": multiplier,
                "bit_multiplier": None,
            }
        )

    def _rounds_from(self, round_number: int) -> int:
        """Return how many rounds there are from this one on, which an epsilon needs."""
        assert self._settings.num_rounds is not None  # see check_endless
        return max(self._settings.num_rounds - round_number + 1, 1)

    def add_noise_to_sums(
        self,
        extra: ExtraSums,
        terms: PrivacyTerms,
        *,
        max_examples: int,
        round_number: int,
        names: Iterable[str],
    ) -> float:
        """Add the noise to a round's sums beside the model's, after that is on disk.

        Return the standard deviation of the noise in each of their numbers.

        Raises:
            StateError: see ``write_events``.
        """
        bits = plain_scale_bits(terms)
        sigma = statistics_sigma(
            terms, scale_bits=bits, num_values=extra.num_values, max_examples=max_examples
        )
        self._note(terms.noise_multiplier, epochs=self._epochs_after(round_number, terms, names))
        extra.add_integers(partial(draw, sigma, bits=RandomBits(self._random)))
        return math.ldexp(sigma, -bits)

    def _epochs_after(
        self, round_number: int, terms: PrivacyTerms, names: Iterable[str]
    ) -> ExampleEpochs | None:
        if self._epochs is None:
            return None
        shares = {name: self._shares[name] for name in names}
        return self._epochs.after(round_number, terms.rho, shares)

    def add_noise(
        self,
        total: CohortSum,
        terms: PrivacyTerms,
        *,
        round_number: int,
        names: Iterable[str],
        clip_bits: Sequence[int] = (),
    ) -> float | None:
        """Add the noise to a plain round's sum, after it is on disk that this sum was opened.

        ``names`` are the devices whose updates are in it. Return the noisy sum of their bits (0 or
        1) on the clip norm, each counted as -1 or +1; None if the clip norm does not follow them.

        Raises:
            StateError: see ``write_events``.
        """
        if self._banded is not None:
            noise = self._banded.next(frozenset(names))
            self._write(Accountant(self.delta, self._banded.events))
            self._banded.forget_old()
            total.add_integers(noise)
            return None
        bits = plain_scale_bits(terms)
        sigma = plain_sigma(terms, scale_bits=bits, num_values=self._num_values)
        self._note(terms.noise_multiplier, epochs=self._epochs_after(round_number, terms, names))
        total.add_integers(partial(draw, sigma, bits=RandomBits(self._random)))
        if terms.bit_multiplier is None:
            return None
        steps, bit_noise = bit_steps(terms), RandomBits(self._random)
        integers = steps * sum(2 * bit - 1 for bit in clip_bits)
        return (integers + int(draw(bit_sigma(terms), 1, bit_noise)[0])) / steps

    def follow_clip(self, bit_sum: float | None, *, num_devices: int) -> None:
        """Set the next round's clip norm, when a round with this sum of bits is committed."""
        self.clip = self.clip.after(bit_sum, num_devices=num_devices)

    def note_unmasked(self, opened: UnmaskedSum, terms: PrivacyTerms) -> None:
        """Note an opened masked sum, with the noise of the devices that survived.

        A round may have several sums, of disjoint groups of devices. A device is in one of them, so
        together they cost what the one with the least noise costs.

        Raises:
            StateError: see ``write_events``.
        """
        parameters = opened.session.parameters
        multiplier = opened_multiplier(
            terms,
            scale_bits=parameters.encoding.scale_bits,
            num_values=parameters.num_values,
            num_members=len(opened.survived) + len(opened.dropped),
            num_survivors=len(opened.survived),
        )
        least, self._least_of_round = self._least_of_round, multiplier
        if least is None:
            self._note(multiplier)
        elif multiplier < least:
            self._note(multiplier, in_place_of=least)
        else:
            self._least_of_round = least
        self._gain = (self._least_of_round / terms.noise_multiplier) ** 2

    def note_committed(self, round_number: int) -> None:
        """Note on disk that the last opened sum's round is in a checkpoint, if it is.

        ``round_number`` is the checkpoint's.

        Raises:
            StateError: see ``write_events``.
        """
        epochs = self._epochs
        if epochs and not epochs.is_committed and 0 < epochs.round <= round_number:
            self._write(self._accountant, replace(epochs, is_committed=True))

    def _note(
        self,
        noise_multiplier: float,
        *,
        in_place_of: float | None = None,
        epochs: ExampleEpochs | None = None,
    ) -> None:
        events = self._accountant.events
        if in_place_of is not None:
            (_, count), events = events[-1], events[:-1]
            events = [*events, (in_place_of, count - 1)]
        after = Accountant(self._accountant.delta, events)
        after.add(noise_multiplier)
        self._write(after, epochs)

    def _write(self, after: Accountant, epochs: ExampleEpochs | None = None) -> None:
        write_events(
            self._settings.out,
            after.events,
            epsilon=after.epsilon if epochs is None else epsilon_of(epochs.most, delta=after.delta),
            delta=after.delta,
            unit=self.unit,
            epochs=epochs,
            banded=None if self._banded is None else self._banded.to_json(),
        )
        self.publish()
        self._accountant, self._epochs = after, epochs
