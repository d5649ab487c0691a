"""The address in a join token: where the server will open its enrolment port."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwater.common.errors import CertificateProblem, SettingsError
from headwater.common.transport.join_token import JoinToken
from headwater.server.enrolment.commands import SETTINGS_FILE, make_folder, make_token
from headwater.server.enrolment.token_registry import Registry


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_folder(tmp_path, hosts=["127.0.0.1"], certificates_last=None)
    return tmp_path


def listen(folder: Path, address: str, *more: str) -> None:
    path = folder / SETTINGS_FILE
    lines = [f'listen = "{address}"', *more]
    path.write_text(path.read_text().replace('listen = "127.0.0.1:8500"', "\n".join(lines)))


def test_a_token_without_an_authority_names_the_flag_for_its_folder(tmp_path: Path) -> None:
    with pytest.raises(CertificateProblem, match="No such file") as failed:
        make_token(tmp_path / "certs", "pi", address=None, valid="1h")
    assert failed.value.remedy.startswith("name its folder with --folder, or create it")


def address_of(folder: Path) -> str:
    token = make_token(folder, "pi", address=None, valid="1h")
    return JoinToken.parse(token).address


def test_before_the_server_has_run_a_token_names_the_port_after_the_one_in_its_settings(
    folder: Path,
) -> None:
    assert address_of(folder) == "127.0.0.1:8501"
    listen(folder, "0.0.0.0:9000")
    assert address_of(folder) == "127.0.0.1:9001"


def test_before_the_server_has_run_a_token_names_the_enrolment_port_of_its_settings(
    folder: Path,
) -> None:
    listen(folder, "127.0.0.1:9000", 'enrolment_listen = "127.0.0.1:9555"')
    assert address_of(folder) == "127.0.0.1:9555"


def test_a_token_names_the_port_that_the_server_had_last(folder: Path) -> None:
    listen(folder, "127.0.0.1:9000")
    with Registry(folder) as registry:
        registry.set_fact("enrolment_port", "9777")
    assert address_of(folder) == "127.0.0.1:9777"


def test_a_port_that_is_not_known_yet_is_asked_for(folder: Path) -> None:
    listen(folder, "127.0.0.1:0")
    with pytest.raises(SettingsError, match="not known before it runs"):
        address_of(folder)


@pytest.mark.skipif(os.name != "posix", reason="no mode bits")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_only_the_owner_may_enter_the_authority_s_folder_at_any_umask(
    tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        make_folder(tmp_path / "certs", hosts=["127.0.0.1"], certificates_last=None)
    finally:
        os.umask(before)
    assert (tmp_path / "certs").stat().st_mode & 0o777 == 0o700
