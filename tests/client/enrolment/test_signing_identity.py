"""Identity and allow-list: mismatches are reported with a remedy, and keys are never quoted."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from headwater.client.device.host_name import host_name
from headwater.client.enrolment.signing_identity import (
    check_enrolment,
    make_identity,
    read_identity,
)
from headwater.common.errors import IdentityProblem
from headwater.common.settings.schema import SecureSettings
from headwater.common.transport.limits import NAME_PATTERN


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("Büro-PC", "B-ro-PC"),
        ("ana's mac.local", "ana-s-mac.local"),
        ("日本", "device"),
        ("a" * 200, "a" * 128),
    ],
)
def test_any_host_has_a_name_that_the_server_admits(
    host: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    assert host_name() == name
    assert re.fullmatch(NAME_PATTERN, name)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    paths = {name: tmp_path / name for name in ("a", "b", "stranger")}
    lines = [make_identity(path, name)[0].line for name, path in paths.items()]
    (tmp_path / "list").write_text("\n".join(lines[:2]))
    return {**paths, "list": tmp_path / "list"}


def enrol(name: str, identity: Path, allow_list: Path) -> None:
    check_enrolment(
        SecureSettings(aggregation="active", identity=identity, allow_list=allow_list), name
    )


def test_a_device_on_its_own_allow_list_is_enrolled(files: dict[str, Path]) -> None:
    enrol("a", files["a"], files["list"])


@pytest.mark.parametrize(
    ("name", "identity", "says", "remedy"),
    [
        ("b", "a", "under the name a", "--name a"),
        ("a", "stranger", "another key under this name", "allow-list of every device"),
        ("stranger", "stranger", "no entry for this device", "allow-list of every device"),
    ],
)
def test_an_identity_that_does_not_match_the_allow_list_gets_a_remedy(
    name: str, identity: str, says: str, remedy: str, files: dict[str, Path]
) -> None:
    with pytest.raises(IdentityProblem, match=says) as caught:
        enrol(name, files[identity], files["list"])
    assert remedy in caught.value.remedy


def test_a_file_with_other_content_is_named_and_not_quoted(files: dict[str, Path]) -> None:
    with pytest.raises(IdentityProblem, match=str(files["list"])) as no_key:
        read_identity(files["list"], "a")
    with pytest.raises(IdentityProblem, match=str(files["a"])) as no_list:
        enrol("a", files["a"], files["a"])  # the private key, where the public ones should be
    for line in files["a"].read_text().splitlines() + files["list"].read_text().splitlines():
        assert line not in str(no_key.value)
        assert line not in str(no_list.value)
