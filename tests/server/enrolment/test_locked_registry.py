"""A registry that another process holds for too long, in the moment of a revocation."""

from __future__ import annotations

import datetime as dt
import sqlite3
from pathlib import Path

import pytest

from headwater.common.errors import StateError
from headwater.server.enrolment.registry_verifier import RegistryVerifier
from headwater.server.enrolment.token_registry import Registry
from headwater.server.transport.peer_certificates import PeerCertificate


def test_a_revocation_that_could_not_be_read_is_looked_up_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, operators = Registry(tmp_path, create=True), Registry(tmp_path)
    operators._database.execute(
        "INSERT INTO certificates VALUES ('s','pi',x'01',x'02',9e9,NULL,NULL)"
    )
    verifier = RegistryVerifier(registry=registry)
    end = dt.datetime(2200, 1, 1, tzinfo=dt.UTC)
    given = PeerCertificate(serial="s", name="pi", key=b"\1", half_life=end, expires_at=end)
    verifier.newly_invalid([given])
    operators.revoke("pi")
    lock = sqlite3.connect(registry.path, isolation_level=None)
    has_changed = registry.has_changed

    def then_locked() -> bool:
        found = has_changed()
        lock.execute("BEGIN EXCLUSIVE")
        return found

    with monkeypatch.context() as patched:
        patched.setattr(registry, "has_changed", then_locked)
        with pytest.raises(StateError):
            verifier.newly_invalid([given])
    lock.execute("ROLLBACK")
    assert list(verifier.newly_invalid([given])) == ["s"]
    lock.close()
