"""A run's correlated noise: what the last rounds' sums got, the devices in them, and their file.

``server.privacy.bands`` has the mathematics. All state is on disk before a sum is used: the record
of the devices in privacy.json, and the noise of the last b - 1 sums in the folder privacy_noise, a
file of 4 bytes for each coordinate a sum. Whoever reads these files can take the noise off the
models; only their owner may. A round that a crash undid stays in the record, and its noise too.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headwater.common.errors import (
    CheckpointCorrupt,
    PrivacySpent,
    SettingsError,
    StateError,
    TooFewClients,
)
from headwater.common.privacy.discrete_gaussian import CHUNK, RandomBits, draw
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.settings.schema import PrivacySettings
from headwater.common.system.atomic_file import (
    OWNER_ONLY,
    make_private_folder,
    write_atomically,
)
from headwater.common.wording import counted
from headwater.server.privacy.bands import (
    banded_scale_bits,
    banded_sigma,
    coefficients,
    correlated,
)
from headwater.server.privacy.participation import Participation

NOISE_FOLDER = "privacy_noise"
Integers = NDArray[np.int64]


class BandedNoise:
    """The correlated noise of one run."""

    def __init__(
        self,
        bands: int,
        *,
        multiplier: float,
        most: int | None,
        num_values: int,
        folder: Path | None,
        random: Callable[[int], bytes],
    ) -> None:
        """Begin without noise; no device may be in more than ``most`` sums.

        ``multiplier`` is the noise multiplier of each sum that a device is in.
        """
        self.bands = bands
        self.multiplier = multiplier
        self.record = Participation()
        self._most = most
        self._num_values = num_values
        self._folder = None if folder is None else folder / NOISE_FOLDER
        self._random = random
        self._sigma: int | None = None
        self._scale_bits: int | None = None
        self._digests: deque[str] = deque(maxlen=bands - 1)
        self._before: deque[NDArray[np.int32]] = deque(maxlen=bands - 1)
        """The noise of the last sums, the newest first."""

    @property
    def events(self) -> list[tuple[float, int]]:
        """The noise multiplier, and the sums of the device in most sums."""
        times = self.record.most_times
        return [(self.multiplier, times)] if times else []

    def scale_bits(self, terms: PrivacyTerms) -> int:
        """Return f of a round's sum, and check that it is that of all rounds.

        Raises:
            SettingsError: clip norm, batch or noise are no longer those of the first sum.
        """
        bits = banded_scale_bits(terms, bands=self.bands)
        sigma = banded_sigma(terms, bands=self.bands, scale_bits=bits, num_values=self._num_values)
        if (self._scale_bits or bits, self._sigma or sigma) != (bits, sigma):
            raise SettingsError(
                "the noise of this run is correlated over its rounds, and clip norm, batch or "
                "noise are no longer those of its first round",
                remedy="resume with the run's own settings; or begin a new run: another --out",
            )
        self._scale_bits, self._sigma = bits, sigma
        return bits

    def awaited(self, *, seed: int, needed: int) -> Callable[[str], bool] | None:
        """Return which devices a round waits for: new ones, and those that may be in its sum.

        None if too few of those that were in a sum may: ``due`` says why.
        """
        known = self.record.times
        may = set(self.record.due(known, bands=self.bands, most=self._most, seed=seed))
        return None if len(may) < needed else lambda name: name in may or name not in known

    def due(self, names: Collection[str], *, seed: int, needed: int) -> list[str]:
        """Return the devices that may be in the next sum, in turn; ``needed`` must be.

        Raises:
            PrivacySpent: too few, and the others were in as many sums as the epsilon allows.
            TooFewClients: too few, and the others were in a sum too few rounds ago.
        """
        found = self.record.due(names, bands=self.bands, most=self._most, seed=seed)
        if len(found) >= min(needed, len(names)):
            return found
        most, times = self._most, self.record.times
        num_spent = sum(times.get(name, 0) >= most for name in names) if most is not None else 0
        if len(names) - num_spent < min(needed, len(names)):
            raise PrivacySpent(
                f"{num_spent} of {counted(len(names), 'device')} took part "
                f"{counted(most or 0, 'time')}: as often as the run's epsilon allows"
            )
        raise TooFewClients(
            f"{len(found)} of {counted(len(names), 'device')} may take part, and {needed} must: "
            f"the others took part in one of the last {self.bands - 1} rounds",
            remedy="lower --privacy-bands or --cohort-size (their product should be at most the "
            "number of devices), or wait for more devices",
        )

    def next(self, names: Collection[str]) -> Callable[[int], Integers]:
        """Return the noise of one more sum, of these devices, part by part; it is on disk before.

        Raises:
            StateError: it cannot be written.
        """
        early = [name for name in names if self.record.is_early(name, bands=self.bands)]
        assert not early, early  # the planner calls ``due`` before each round
        assert self._sigma is not None
        bits, multiples = RandomBits(self._random), coefficients(self.bands)
        noise = np.empty(self._num_values, np.int32)
        for start in range(0, self._num_values, CHUNK):
            span = slice(start, min(start + CHUNK, self._num_values))
            fresh = draw(self._sigma, span.stop - span.start, bits)
            part = correlated(fresh, (one[span] for one in self._before), multiples)
            assert -(2**31) <= int(part.min()) <= int(part.max()) < 2**31  # 2^7 deviations
            noise[span] = part
        self.record = self.record.after(names)
        self._keep(noise)
        position = 0

        def parts(number: int) -> Integers:
            nonlocal position
            position += number
            return noise[position - number : position].astype(np.int64)

        return parts

    def _keep(self, noise: NDArray[np.int32]) -> None:
        number, stored = self.record.num_sums, noise.astype("<i4").tobytes()
        self._before.appendleft(noise)
        self._digests.appendleft(hashlib.sha256(stored).hexdigest())
        if self._folder is None:
            return
        try:
            make_private_folder(self._folder)
            write_atomically(self._folder / f"{number}.bin", stored, mode=OWNER_ONLY)
        except OSError as error:
            raise StateError(f"cannot write {self._folder}: {error.strerror}") from error

    def forget_old(self) -> None:
        """Remove the files of sums that no later noise depends on; privacy.json is written.

        Among them are those that a crash between the two left.

        Raises:
            StateError: a file cannot be removed, and could be read later.
        """
        oldest = self.record.num_sums - self.bands + 2
        if self._folder is None:
            return
        try:
            for file in self._folder.glob("*.bin"):
                if file.stem.isdecimal() and int(file.stem) < oldest:
                    file.unlink(missing_ok=True)
        except OSError as error:
            raise StateError(f"cannot remove old noise: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Return what privacy.json has of it."""
        return {
            "bands": self.bands,
            "multiplier": self.multiplier,
            "scale_bits": self._scale_bits,
            "sigma": self._sigma,
            "noise_sha256": list(self._digests),
            **self.record.to_json(),
        }

    def restore(self, row: Mapping[str, Any], *, num_rounds: int) -> None:
        """Take the state that ``to_json`` wrote; the noise is read from its files.

        Raises:
            CheckpointCorrupt: a file is missing, damaged, or of an earlier time.
        """
        try:
            self.record = Participation.of_json(row)
            self._scale_bits, self._sigma = int(row["scale_bits"]), int(row["sigma"])
            self._digests.extend(map(str, row["noise_sha256"]))
            if self.record.num_sums < num_rounds:
                raise ValueError(
                    f"{counted(self.record.num_sums, 'sum')}, and the run has {num_rounds} rounds"
                )
            assert self._folder is not None
            for back, digest in enumerate(self._digests):
                stored = (self._folder / f"{self.record.num_sums - back}.bin").read_bytes()
                if hashlib.sha256(stored).hexdigest() != digest:
                    raise ValueError(f"the noise of sum {self.record.num_sums - back} is another")
                self._before.append(np.frombuffer(stored, "<i4").astype(np.int32))
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(
                f"the record of correlated noise cannot be used: {error}",
                remedy="restore privacy.json and privacy_noise from a backup, as they were last",
            ) from error


def banded_noise(
    chosen: PrivacySettings,
    *,
    rho: float | None,
    rounds: int | None,
    saved: Mapping[str, Any] | None,
    num_rounds: int,
    num_values: int,
    folder: Path | None,
    random: Callable[[int], bytes],
) -> BandedNoise:
    """Return a run's correlated noise, as it was ``saved`` or new.

    ``rho`` is the zCDP that a device may spend; None where the noise is set. A device takes part at
    most ceil(rounds / bands) times, and a new run divides ``rho`` by that. A saved one keeps its
    noise, and devices take part as often as ``rho`` allows. ``rounds`` is None if there is no last
    round; then the noise is set.

    Raises:
        SettingsError: the saved noise has other bands, or another strength than is set.
        CheckpointCorrupt: see ``BandedNoise.restore``.
    """
    bands, multiplier = chosen.bands, chosen.noise_multiplier
    if saved is not None:
        found_bands, found = saved.get("bands"), float(saved.get("multiplier", math.nan))
        if found_bands != bands or (multiplier or found) != found:
            raise SettingsError(
                f"the run's noise is correlated over {found_bands} bands, with a noise multiplier "
                f"of {found:g}; that cannot change",
                remedy="resume with the run's own --privacy-bands and noise; or begin a new run: "
                "another --out",
            )
        multiplier = found
    if multiplier is None:
        assert rho is not None
        assert rounds is not None
        multiplier = math.sqrt(-(-rounds // bands) / (2 * rho)) * (1 + 1e-12)
    most = None if rho is None else math.floor(rho * 2 * multiplier * multiplier * (1 + 1e-9))
    noise = BandedNoise(
        bands,
        multiplier=multiplier,
        most=most,
        num_values=num_values,
        folder=folder,
        random=random,
    )
    if saved is not None:
        noise.restore(saved, num_rounds=num_rounds)
    return noise
