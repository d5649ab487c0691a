"""No message, file, log or repr contains a secret, and masked vectors look random."""

from __future__ import annotations

import base64
import json
import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from headwater.client.secagg.session import SecureSession
from headwater.client.secagg.states import AwaitingMaskRequest, AwaitingUnmask, SessionState
from headwater.common.errors import OutOfPhase, SessionRefused
from headwater.common.secagg.protocol import SEED_BYTES, KeysRequest, Reply, Request
from tests.faults import FaultPlan
from tests.secagg import RUN, Cast, Played

MODES = ("semi-honest", "active")


def forms(secret: bytes) -> list[str]:
    """Return how a secret might be written down."""
    return [
        secret.hex(),
        secret.hex().upper(),
        base64.b64encode(secret).decode().rstrip("="),
        base64.urlsafe_b64encode(secret).decode().rstrip("="),
        repr(secret)[2:-1],
        repr(list(secret))[1:-1],
    ]


def strings(value: Any) -> Iterator[str]:
    """Yield all strings in parsed JSON, keys as well."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(key)
            yield from strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings(inner)


def binary(head: str) -> Iterator[bytes]:
    """Yield what the strings of a head say in base64."""
    for text in strings(json.loads(head)):
        try:
            yield base64.urlsafe_b64decode(text)
        except ValueError:
            continue


class Watched(SecureSession):
    """A device that is looked at after every answer, as a debugger or a crash report would."""

    shown: list[str]
    secrets: dict[str, bytes]

    def answer(self, request: Request, bounds: memoryview | bytes | None = None) -> Reply:
        reply = super().answer(request, bounds)
        self.shown += [repr(self), repr(reply), str(reply), repr(self.state), repr(self.record)]
        fields = {n: v for n, v in vars(self).items() if n not in ("shown", "secrets")}
        self.shown += [repr(fields), f"{self.state}"]
        self._note(self.state)
        try:
            super().answer(KeysRequest(run=RUN, round=1, attempt=0, mode="active"))
        except SessionRefused as error:  # an error's text travels to the server
            self.shown += [repr(error), str(error)]
        return reply

    def _note(self, state: SessionState | None) -> None:
        for number, secret in enumerate(state.secrets() if state is not None else ()):
            if not secret.is_erased:
                self.secrets[f"{type(state).__name__} {number}"] = bytes(secret.reveal())


@pytest.mark.parametrize("mode", MODES)
def test_no_secret_appears_in_a_repr_log_record_error_or_message(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    planted: dict[str, list[bytes]] = {}

    def random_of(name: str) -> Callable[[int], bytes]:
        generator = np.random.default_rng(int.from_bytes(name.encode(), "little"))

        def random(count: int) -> bytes:
            drawn = generator.bytes(count)
            if count == SEED_BYTES:  # key pairs and self seed; nonces are public, and shorter
                planted.setdefault(name, []).append(drawn)
            return drawn

        return random

    cast = Cast(5, mode=mode, num_values=64, random=random_of)
    watched: dict[str, Watched] = {}
    for name, party in cast.parties.items():
        honest = party.session
        assert isinstance(honest, SecureSession)
        session = Watched(
            party.device, honest.record, store=party.stored.append, update=honest.update
        )
        session.shown, session.secrets = [], {}
        party.session = watched[name] = session
    played = Played()
    cast.play_into(played, FaultPlan().drop(client="d004", after="check_shares"))
    for session in watched.values():
        session.close()
        session.shown.append(repr(session))

    assert all(len(drawn) == 3 for drawn in planted.values())  # two keys and a seed
    secrets = {secret for drawn in planted.values() for secret in drawn}
    for name, session in watched.items():  # as the states hold them, with shares of others
        assert secrets >= set(planted[name])
        secrets |= set(session.secrets.values())
    shown = [text for session in watched.values() for text in session.shown]
    shown += [repr(party.device) for party in cast.parties.values()]
    shown += [json.dumps(asdict(r)) for p in cast.parties.values() for r in p.stored]
    shown += [repr(played.phase), repr(played.opened), caplog.text]
    for secret in secrets:
        for form in forms(secret):
            assert not any(form in text for text in shown)
        as_it_might_be = (secret, list(secret), secret.hex(), base64.b64encode(secret))
        for text in map(repr, as_it_might_be):  # the search has teeth
            assert any(form in text for form in forms(secret))

    # Messages may tell shares, one kind for each dealer and only in the last phase.
    revealed = {
        bytes(share)
        for reply in played.replies["unmask"].values()
        for share in (*reply.self_seed_shares.values(), *reply.mask_key_shares.values())
    }
    assert revealed
    travelled = [data for head in played.heads for data in binary(head)]
    travelled += list(played.vectors.values())
    for secret in secrets - revealed:
        assert not any(secret in data for data in travelled)
    for drawn in planted.values():
        assert not revealed & set(drawn)


@pytest.mark.parametrize("mode", MODES)
def test_no_message_head_contains_a_weight_a_loss_or_a_coordinate(mode: str) -> None:
    cast = Cast(4, mode=mode)
    played = cast.play()
    for name, party in cast.parties.items():
        heads = [
            json.loads(reply.model_dump_json(exclude_none=True))
            for by_name in played.replies.values()
            for reply in [by_name[name]]
        ]
        numbers = {value for head in heads for value in _numbers(head)}
        assert not numbers  # not one number leaves a device in the clear
        masked = played.vectors[name]
        plain = party.values_P.tobytes()
        assert not any(plain[i : i + 4] == masked[i : i + 4] for i in range(0, len(plain), 4))


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner)


def chi_squared(data: NDArray[np.uint8]) -> float:
    """Return Pearson's statistic of bytes against the uniform distribution."""
    expected = len(data) / 256
    return float(((np.bincount(data, minlength=256) - expected) ** 2 / expected).sum())


def largest_chi_squared(num_tests: int) -> float:
    """Return what 255 degrees of freedom exceed once in 10^9 runs of so many tests.

    P(X >= d + 2 sqrt(d x) + 2 x) <= e^-x (Laurent and Massart 2000, lemma 1).
    """
    x = math.log(1e9 * num_tests)
    return 255 + 2 * math.sqrt(255 * x) + 2 * x


def seeded(name: str) -> Callable[[int], bytes]:
    return np.random.default_rng(list(name.encode())).bytes


@pytest.mark.parametrize("ring_bits", [16, 32])
def test_masked_vectors_pass_a_uniformity_test_for_any_update(ring_bits: int) -> None:
    num_values = 1 << 16
    extra: dict[str, Any] = {}
    if ring_bits == 16:
        bounds = np.ones(num_values // 4096, np.float32)
        extra = {"ring_bits": 16, "rotation_seed": bytes(32), "rotation_bounds": bounds}
    cast = Cast(3, num_values=num_values, random=seeded, **extra)
    for name in cast.names[:2]:  # the two easiest to see, and one of random values
        cast.give(name, np.zeros(num_values, np.float32))
    played = cast.play()
    limit = largest_chi_squared(3 * 4 + 3)
    width = ring_bits // 8
    masked = {name: np.frombuffer(v, np.uint8) for name, v in played.vectors.items()}
    for data in masked.values():
        for lane in range(width):  # every byte of an element, the highest as well
            assert chi_squared(data[lane::width]) < limit
    # Neither does the difference of two, in which the mask that they share stands twice.
    one, two, three = (np.frombuffer(v, f"<u{width}") for v in played.vectors.values())
    for difference in (one - two, two - three, one + three):
        assert chi_squared(difference.view(np.uint8)) < limit
    # The test has teeth: what is under the masks fails it.
    plain_P, _ = cast.plain_sum(cast.names, played.sum) if ring_bits == 32 else (None, None)
    if plain_P is not None:
        assert chi_squared(plain_P.view(np.uint8)[3::4]) > limit
    assert chi_squared(np.zeros(num_values, np.uint8)) > limit


def test_the_sum_of_all_but_one_self_mask_still_looks_random() -> None:
    # What a server holds that was refused one device's shares: everybody else's masks are off.
    num_values = 1 << 16
    cast = Cast(3, num_values=num_values, random=seeded)
    for name in cast.names:
        cast.give(name, np.zeros(num_values, np.float32))
    played = cast.play()
    total = sum(np.frombuffer(v, "<u4") for v in played.vectors.values())
    limit = largest_chi_squared(4)
    data = np.asarray(total, np.uint32).view(np.uint8)
    for lane in range(4):
        assert chi_squared(data[lane::4]) < limit


def test_masks_of_two_attempts_are_independent() -> None:
    vectors = []
    for _ in range(2):
        cast = Cast(3, num_values=1 << 16)
        for name in cast.names:
            cast.give(name, np.zeros(1 << 16, np.float32))
        vectors.append(np.frombuffer(cast.play().vectors["d000"], "<u4"))
    assert chi_squared((vectors[0] - vectors[1]).view(np.uint8)) < largest_chi_squared(1)


@pytest.mark.parametrize("mode", MODES)
def test_secrets_are_erased_once_no_later_phase_needs_them(mode: str) -> None:
    cast = Cast(4, mode=mode)
    states: list[SessionState] = []

    class Keeping(SecureSession):
        def answer(self, request: Request, bounds: memoryview | bytes | None = None) -> Reply:
            reply = super().answer(request, bounds)
            assert self.state is not None
            states.append(self.state)
            return reply

    party = cast.parties["d001"]
    honest = party.session
    assert isinstance(honest, SecureSession)
    party.session = Keeping(
        party.device, honest.record, store=party.stored.append, update=honest.update
    )
    erased_when_masked: list[bool] = []

    def look(message: Any) -> Any:
        holding = next(state for state in states if isinstance(state, AwaitingMaskRequest))
        erased_when_masked.append(
            holding.mask_pair.private.is_erased and holding.self_seed.is_erased
        )
        masked = next(state for state in states if isinstance(state, AwaitingUnmask))
        assert not any(secret.is_erased for secret in masked.secrets())
        return message

    played = cast.play(FaultPlan().tell("unmask", look, client="d001"))
    assert erased_when_masked == [True]
    assert played.opened is not None
    everything = {id(secret): secret for state in states for secret in state.secrets()}
    # Two keys, a seed, and two shares of each of four dealers.
    assert len(everything) == 3 + 2 * 4
    assert all(secret.is_erased for secret in everything.values())


@pytest.mark.parametrize("action", ["share_keys", "check_shares", "masked_update", "unmask"])
def test_an_aborted_session_is_erased(action: str) -> None:
    cast = Cast(4)
    session = cast.parties["d001"].session
    assert isinstance(session, SecureSession)
    kept: list[SessionState] = []

    def give_up(message: Any) -> Any:
        assert session.state is not None
        kept.append(session.state)
        session.close()
        return message

    played = Played()
    cast.play_into(played, FaultPlan().tell(action, give_up, client="d001"))
    assert isinstance(played.refused["d001"], OutOfPhase)
    secrets = list(kept[0].secrets())
    assert len(secrets) >= 2
    assert all(secret.is_erased for secret in secrets)


def test_devices_reveal_only_seed_shares_of_survivors_and_key_shares_of_dropouts() -> None:
    cast = Cast(6, mode="active")
    played = cast.play(FaultPlan().drop(client="d004", after="check_shares"))
    survived = [name for name in cast.names if name != "d004"]
    for reply in played.replies["unmask"].values():
        assert sorted(reply.self_seed_shares) == survived
        assert list(reply.mask_key_shares) == ["d004"]
