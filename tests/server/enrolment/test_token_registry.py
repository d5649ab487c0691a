"""The registry: a token admits one device once, and a revoked certificate stays revoked."""

from __future__ import annotations

import datetime as dt
import multiprocessing
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from headwater.common.errors import (
    CertificateProblem,
    IdentityRefused,
    JoinTokenExpired,
    JoinTokenUnknown,
    JoinTokenUsed,
    NameTaken,
    StateError,
)
from headwater.common.transport.certificates import (
    Key,
    key_digest,
    new_key,
    serial_of,
    signing_request,
)
from headwater.server.enrolment.authority import Authority
from headwater.server.enrolment.join_request import JoinRequest, issue
from headwater.server.enrolment.token_registry import LINGER_SECONDS, REGISTRY_FILE, Registry
from tests.certificates import make_folder, token_for

NOW = 1_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


@pytest.fixture
def registry(folder: Path) -> Iterator[Registry]:
    found = Registry(folder)
    yield found
    found.close()


class Signer:
    """Signs certificates for one key, and counts them."""

    def __init__(self, folder: Path, name: str, key: Key | None = None) -> None:
        self._authority, self._name = Authority.load(folder), name
        self._key = key or new_key()
        self.times = 0

    @property
    def digest(self) -> bytes:
        return key_digest(self._key.public_key())

    def __call__(self) -> x509.Certificate:
        self.times += 1
        lifetime = dt.timedelta(days=1)
        return self._authority.sign_device(self._name, self._key.public_key(), lifetime=lifetime)


def redeem(registry: Registry, secret: bytes, name: str, sign: Signer, now: float = NOW) -> bytes:
    return registry.redeem(secret, name, sign.digest, now=now, sign=sign)


def serial_in(pem: bytes) -> str:
    return serial_of(x509.load_pem_x509_certificate(pem))


def test_a_token_is_valid_once_and_for_repeats_with_the_same_key(
    folder: Path, registry: Registry
) -> None:
    registry.add_token("pi", b"s", expires_at=NOW + 60, now=NOW)
    first, other = Signer(folder, "pi"), Signer(folder, "pi")
    pem = redeem(registry, b"s", "pi", first)
    assert redeem(registry, b"s", "pi", first) == pem
    assert first.times == 1
    with pytest.raises(JoinTokenUsed):
        redeem(registry, b"s", "pi", other)
    assert other.times == 0


def test_a_token_expires_by_the_servers_clock(folder: Path, registry: Registry) -> None:
    registry.add_token("pi", b"s", expires_at=NOW + 60, now=NOW)
    with pytest.raises(JoinTokenExpired):
        redeem(registry, b"s", "pi", Signer(folder, "pi"), now=NOW + 61)


def test_a_token_is_valid_only_for_its_name(folder: Path, registry: Registry) -> None:
    registry.add_token("pi", b"s", expires_at=NOW + 60, now=NOW)
    with pytest.raises(JoinTokenUnknown):
        redeem(registry, b"s", "laptop", Signer(folder, "laptop"))
    with pytest.raises(JoinTokenUnknown):
        redeem(registry, b"t", "pi", Signer(folder, "pi"))


def test_a_new_token_of_a_name_voids_the_one_before(folder: Path, registry: Registry) -> None:
    registry.add_token("pi", b"s", expires_at=NOW + 60, now=NOW)
    registry.add_token("pi", b"t", expires_at=NOW + 60, now=NOW)
    with pytest.raises(JoinTokenUnknown):
        redeem(registry, b"s", "pi", Signer(folder, "pi"))
    redeem(registry, b"t", "pi", Signer(folder, "pi"))


def test_the_port_is_open_while_a_token_is_valid_and_a_minute_after_its_use(
    folder: Path, registry: Registry
) -> None:
    assert not registry.has_open_token(NOW)
    registry.add_token("pi", b"s", expires_at=NOW + 600, now=NOW)
    assert registry.has_open_token(NOW + 600)
    assert not registry.has_open_token(NOW + 601)
    redeem(registry, b"s", "pi", Signer(folder, "pi"))
    assert registry.has_open_token(NOW + LINGER_SECONDS)
    assert not registry.has_open_token(NOW + LINGER_SECONDS + 1)


def test_a_name_with_a_valid_certificate_is_taken_until_it_is_revoked(
    folder: Path, registry: Registry
) -> None:
    now = time.time()
    registry.add_token("pi", b"s", expires_at=now + 60, now=now)
    redeem(registry, b"s", "pi", Signer(folder, "pi"), now=now)
    with pytest.raises(NameTaken):
        registry.add_token("pi", b"t", expires_at=now + 60, now=now)
    assert registry.revoke("pi") == 1
    assert registry.revoke("pi") == 0
    registry.add_token("pi", b"t", expires_at=now + 60, now=now)


def test_a_revoked_certificate_stays_revoked_when_the_name_is_enrolled_again(
    folder: Path, registry: Registry
) -> None:
    registry.add_token("pi", b"s", expires_at=NOW + 60, now=NOW)
    old = redeem(registry, b"s", "pi", Signer(folder, "pi"))
    registry.revoke("pi")
    registry.add_token("pi", b"t", expires_at=NOW + 60, now=NOW)
    new = redeem(registry, b"t", "pi", Signer(folder, "pi"))
    ended = [registry.entry(serial_in(pem)) for pem in (old, new)]
    assert [entry.ended for entry in ended if entry] == ["revoked", None]


def test_a_key_is_certified_once(folder: Path, registry: Registry) -> None:
    registry.add_token("pi", b"s", expires_at=NOW + 60, now=NOW)
    sign = Signer(folder, "pi")
    redeem(registry, b"s", "pi", sign)
    registry.revoke("pi")
    registry.add_token("pi", b"t", expires_at=NOW + 60, now=NOW)
    with pytest.raises(IdentityRefused):
        redeem(registry, b"t", "pi", sign)
    redeem(registry, b"t", "pi", Signer(folder, "pi"))  # the token is as it was


def test_revoking_voids_the_open_token(folder: Path, registry: Registry) -> None:
    registry.add_token("pi", b"s", expires_at=NOW + 60, now=NOW)
    registry.revoke("pi")
    with pytest.raises(JoinTokenUnknown):
        redeem(registry, b"s", "pi", Signer(folder, "pi"))


def test_an_unused_renewal_is_replaced_by_the_next(folder: Path, registry: Registry) -> None:
    registry.add_token("pi", b"s", expires_at=NOW + 60, now=NOW)
    serial = serial_in(redeem(registry, b"s", "pi", Signer(folder, "pi")))
    lost, kept = Signer(folder, "pi"), Signer(folder, "pi")
    first = serial_in(registry.renew(serial, "pi", lost.digest, sign=lost))
    second = serial_in(registry.renew(serial, "pi", kept.digest, sign=kept))
    assert registry.entry(first) is None
    found = registry.entry(second)
    assert found is not None
    assert (found.renews, found.ended) == (serial, None)
    registry.end_renewed(serial)
    with pytest.raises(IdentityRefused):
        registry.renew(serial, "pi", Signer(folder, "pi").digest, sign=lost)


def test_revoking_a_name_ends_its_renewed_certificate_too(folder: Path, registry: Registry) -> None:
    registry.add_token("pi", b"s", expires_at=NOW + 60, now=NOW)
    serial = serial_in(redeem(registry, b"s", "pi", Signer(folder, "pi")))
    sign = Signer(folder, "pi")
    second = serial_in(registry.renew(serial, "pi", sign.digest, sign=sign))
    assert registry.revoke("pi") == 2
    found = registry.entry(second)
    assert found is not None
    assert found.ended == "revoked"


def test_a_reader_notices_another_connections_change(folder: Path, registry: Registry) -> None:
    other = Registry(folder)
    registry.has_changed()
    assert not registry.has_changed()
    other.revoke("nobody")
    other.set_fact("x", "y")
    assert registry.has_changed()
    assert not registry.has_changed()
    other.close()


def _redeem_in_process(folder: Path, secret: bytes, found: object) -> None:
    registry = Registry(folder)
    try:
        redeem(registry, secret, "pi", Signer(folder, "pi"))
        outcome = "certificate"
    except JoinTokenUsed:
        outcome = "used"
    registry.close()
    found.put(outcome)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_one_of_several_concurrent_processes_gets_the_certificate(
    folder: Path, registry: Registry
) -> None:
    registry.add_token("pi", b"s", expires_at=NOW + 60, now=NOW)
    context = multiprocessing.get_context("forkserver")
    found = context.Queue()
    processes = [
        context.Process(target=_redeem_in_process, args=(folder, b"s", found)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    outcomes = sorted(found.get(timeout=280) for _ in processes)
    for process in processes:
        process.join()
    assert outcomes == ["certificate", "used", "used", "used"]


def test_a_registry_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError):
        Registry(tmp_path)
    (tmp_path / REGISTRY_FILE).write_bytes(b"not a database, and long enough to be told apart" * 9)
    with pytest.raises(StateError):
        Registry(tmp_path)


def test_the_file_contains_no_tokens_secret(folder: Path) -> None:
    token = token_for(folder, "pi")
    base = sqlite3.connect(folder / REGISTRY_FILE)
    base.execute("VACUUM")
    base.close()
    content = (folder / REGISTRY_FILE).read_bytes()
    assert token.secret_digest in content
    assert token.secret not in content


def test_a_signing_request_for_another_name_or_of_another_kind_is_refused(
    folder: Path, registry: Registry
) -> None:
    token, authority = token_for(folder, "pi"), Authority.load(folder)

    def ask(request: bytes) -> bytes:
        join_request = JoinRequest(name="pi", secret=token.secret, signing_request=request)
        return issue(join_request, authority, registry, now=time.time())

    with pytest.raises(IdentityRefused):
        ask(signing_request("laptop", new_key()))
    for broken in (b"", b"no PEM", b"-" * 5000, signing_request("pi", new_key())[:-40]):
        with pytest.raises(CertificateProblem):
            ask(broken)
    assert x509.load_pem_x509_certificate(ask(signing_request("pi", new_key())))
