"""A file on which a promise rests is its owner's: others may not change it, nor read a key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headwater.client.enrolment.signing_identity import make_identity, read_enrolment
from headwater.common.errors import CertificateProblem, IdentityProblem
from headwater.common.settings.schema import TlsSettings
from headwater.common.transport.tls import read_credentials
from headwater.common.transport.trusted_file import UntrustedFile, check_folder, read_trusted

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no such owners and modes")
STRANGER = 54321
as_root = pytest.mark.skipif(
    os.name == "posix" and os.geteuid() != 0, reason="only root gives away"
)


def file_of(folder: Path, mode: int) -> Path:
    path = folder / "file"
    path.write_bytes(b"content")
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("mode", "is_secret", "why"),
    [
        (0o600, True, None),
        (0o400, True, None),
        (0o644, False, None),
        (0o644, True, r"others may read it \(644\); chmod 600"),
        (0o604, True, "others may read it"),
        (0o664, False, r"others may change it \(664\); chmod go-w"),
        (0o602, True, "others may change it"),
    ],
)
def test_the_rights_of_others_decide(
    tmp_path: Path, mode: int, why: str | None, *, is_secret: bool
) -> None:
    path = file_of(tmp_path, mode)
    if why is None:
        assert read_trusted(path, is_secret=is_secret) == b"content"
        return
    with pytest.raises(UntrustedFile, match=why):
        read_trusted(path, is_secret=is_secret)


def test_only_a_regular_file_is_read_and_a_fifo_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    for path in (tmp_path / "fifo", Path("/dev/null")):
        with pytest.raises(UntrustedFile, match="it is no regular file"):
            read_trusted(path)
    with pytest.raises(UntrustedFile, match=r"it is no regular file"):
        read_trusted(tmp_path)


@as_root
def test_a_stranger_s_file_and_a_stranger_s_link_to_one_s_own_are_refused(tmp_path: Path) -> None:
    own, link = file_of(tmp_path, 0o600), tmp_path / "link"
    link.symlink_to(own)
    assert read_trusted(link, is_secret=True) == b"content"
    os.chown(link, STRANGER, STRANGER, follow_symlinks=False)
    with pytest.raises(UntrustedFile, match="it belongs to user 54321"):
        read_trusted(link)
    os.chown(own, STRANGER, STRANGER)
    with pytest.raises(UntrustedFile, match="it belongs to user 54321"):
        read_trusted(own)


@as_root
def test_a_state_folder_that_others_change_is_refused(tmp_path: Path) -> None:
    check_folder(tmp_path / "none yet")
    check_folder(tmp_path)
    tmp_path.chmod(0o777)
    with pytest.raises(UntrustedFile, match=r"others may change it \(777\)"):
        check_folder(tmp_path)


def test_a_device_takes_no_allow_list_that_others_may_change(tmp_path: Path) -> None:
    """Whoever adds a line to it is a member that the device masks with."""
    line = make_identity(tmp_path / "key", "pi")[0].line
    path = tmp_path / "allow-list"
    path.write_text(f"{line}\n")
    path.chmod(0o666)
    with pytest.raises(IdentityProblem, match=r"others may change it \(666\); chmod go-w"):
        read_enrolment("pi", identity=tmp_path / "key", allow_list=path)


@pytest.mark.parametrize(("name", "mode"), [("ca", 0o666), ("certificate", 0o666), ("key", 0o644)])
def test_no_tls_file_of_others_is_taken(tmp_path: Path, name: str, mode: int) -> None:
    files = {one: tmp_path / one for one in ("ca", "certificate", "key")}
    for path in files.values():
        path.write_text("")
        path.chmod(0o600)
    files[name].chmod(mode)
    with pytest.raises(
        CertificateProblem, match=rf"--tls-{name} .*others may \w+ it \({mode:03o}\)"
    ):
        read_credentials(TlsSettings(**files))
