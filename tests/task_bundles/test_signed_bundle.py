"""Signed tasks: what a device takes, and what it refuses by name."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import headwater
from headwater.client.task_bundles.kept_tasks import INDEX, kept_tasks, show, taken
from headwater.common.errors import SettingsError, TaskBundleRefused, UnknownTask
from headwater.common.model.trained_model import read_model
from headwater.common.settings.schema import ClientSettings
from headwater.common.task_bundles.signed_bundle import (
    CONTEXT,
    FOLDER,
    MAGIC,
    MAX_BYTES,
    Content,
    opened_task,
    read_bundle,
    signed,
    unpacked,
)
from headwater.common.user_code.task_spec import code_at
from headwater.server.task_bundles.publish import (
    publish,
    publish_again,
    saved_signer_key,
    signer_key,
)
from tests.task_bundles.bundles import new_key, publish_code, write_code

PLAIN: dict[str, Any] = {"name": "T", "file": "t.py", "version": 1, "files": {"t.py": ""}}


def device_of(folder: Path, *keys: str, **given: Any) -> ClientSettings:
    return ClientSettings.model_validate({"state": folder / "state", "trust": list(keys), **given})


def test_a_trusted_task_is_kept_by_its_digest_and_loaded_with_all_its_files(
    tmp_path: Path,
) -> None:
    key, text = new_key(tmp_path / "signer.key")
    bundle, file = publish_code(tmp_path, key, version=3)
    device = device_of(tmp_path, text)
    found, spec = taken(file.read_bytes(), device)
    assert found == bundle
    own = tmp_path / "state" / FOLDER / bundle.digest[:32]
    assert spec == f"{own / 'parity.py'}:Parity"
    assert (own / "sizes.py").read_text() == "WIDTH = 8\n"
    (kept,) = kept_tasks(device.state_folder)
    assert (kept.name, kept.version, kept.digest, kept.signer) == ("Parity", 3, bundle.digest, text)
    taken(file.read_bytes(), device)  # the same again changes nothing
    assert kept_tasks(device.state_folder) == [kept]


def test_the_same_files_have_the_same_digest_whoever_signs(tmp_path: Path) -> None:
    first, _ = publish_code(tmp_path, new_key(tmp_path / "a.key")[0], version=1)
    other, _ = publish_code(tmp_path, new_key(tmp_path / "b.key")[0], version=1)
    assert first.digest == other.digest
    assert first.signer != other.signer


def test_what_a_bundle_s_task_imports_is_part_of_its_code(tmp_path: Path) -> None:
    key, _ = new_key(tmp_path / "signer.key")
    codes = set()
    for width in (8, 9):
        bundle, _ = publish_code(tmp_path, key, version=1, width=width)
        codes |= {code_at(unpacked(bundle, tmp_path / str(width)))}
    assert len(codes) == 2


def test_a_device_takes_nothing_of_another_signer(tmp_path: Path) -> None:
    key, _ = new_key(tmp_path / "signer.key")
    _, other = new_key(tmp_path / "other.key")
    _, file = publish_code(tmp_path, key, version=1)
    with pytest.raises(TaskBundleRefused, match="does not trust"):
        taken(file.read_bytes(), device_of(tmp_path, other))
    assert not (tmp_path / "state").exists()


def test_a_signer_who_is_no_longer_trusted_is_refused_also_for_what_is_kept(
    tmp_path: Path,
) -> None:
    key, text = new_key(tmp_path / "signer.key")
    _, other = new_key(tmp_path / "other.key")
    _, file = publish_code(tmp_path, key, version=1)
    taken(file.read_bytes(), device_of(tmp_path, text))
    with pytest.raises(TaskBundleRefused, match="does not trust"):
        taken(file.read_bytes(), device_of(tmp_path, other))


def test_the_list_of_tasks_says_of_no_signer_that_none_is_trusted_if_none_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key, trust = new_key(tmp_path / "signer.key")
    bundle, _ = publish_code(tmp_path, key, version=1)
    taken(bundle.data, device_of(tmp_path, trust))
    show(ClientSettings.model_validate({"state": tmp_path / "state"}), as_json=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "signer not trusted" not in text
    assert "--trust is not set" in text
    show(device_of(tmp_path, new_key(tmp_path / "other.key")[1]), as_json=False)
    assert "signer not trusted" in capsys.readouterr().out


def test_a_downgrade_and_another_task_of_the_same_version_are_refused(tmp_path: Path) -> None:
    key, text = new_key(tmp_path / "signer.key")
    device = device_of(tmp_path, text)
    old, other = (publish_code(tmp_path, key, version=v, width=w)[1] for v, w in ((1, 8), (2, 9)))
    _, new = publish_code(tmp_path, key, version=2)
    taken(new.read_bytes(), device)
    with pytest.raises(TaskBundleRefused, match="is older than the version 2"):
        taken(old.read_bytes(), device)
    with pytest.raises(TaskBundleRefused, match="has other files"):
        taken(other.read_bytes(), device)
    assert [one.version for one in kept_tasks(device.state_folder)] == [2]


def test_an_owner_who_pins_a_digest_gets_that_task_alone_also_an_older_one(
    tmp_path: Path,
) -> None:
    key, text = new_key(tmp_path / "signer.key")
    old, new = (publish_code(tmp_path, key, version=v, width=v) for v in (1, 2))
    taken(new[1].read_bytes(), device_of(tmp_path, text))
    pinned = device_of(tmp_path, text, pin_task=old[0].digest[:16])
    taken(old[1].read_bytes(), pinned)
    with pytest.raises(TaskBundleRefused, match=r"takes .* alone"):
        taken(new[1].read_bytes(), pinned)


def test_what_a_task_needs_is_named_and_not_installed(tmp_path: Path) -> None:
    key, text = new_key(tmp_path / "signer.key")
    bundle, _ = publish_code(tmp_path, key, version=1)
    content = bundle.content.model_copy(update={"requires": ("no-such-thing>=2", "numpy>=99")})
    with pytest.raises(TaskBundleRefused, match="no-such-thing>=2, numpy>=99") as refused:
        taken(signed(content, key), device_of(tmp_path, text))
    assert "pip install 'no-such-thing>=2' 'numpy>=99'" in refused.value.remedy
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    "path",
    [
        *("../t.py", "/t.py", "a//t.py", "./t.py", "a/../t.py", "a\\t.py", "C:t.py", ".t.py"),
        *("t.py/", "con.py", "NUL", "a/aux.py", "t.", "a b.py", "\u00e4.py", "", "x/" * 8 + "t.py"),
    ],
)
def test_a_path_that_leads_elsewhere_is_refused(path: str, tmp_path: Path) -> None:
    key, _ = new_key(tmp_path / "signer.key")
    content = Content.model_construct(**PLAIN | {"files": {"t.py": "", path: ""}, "requires": ()})
    with pytest.raises(TaskBundleRefused, match="content is none"):
        read_bundle(signed(content, key))


@pytest.mark.parametrize(
    "changed",
    [
        {"files": {"t.py": "", "T.PY": ""}},
        {"files": {"t.py": "", "t.py/x": ""}},
        {"files": {"t.py": "not base64!"}},
        {"files": {"other.py": ""}},
        {"files": {}},
        {"file": "t.txt", "files": {"t.txt": ""}},
        {"version": 0},
        {"name": "os.system"},
        {"requires": ("-r x",)},
        {"requires": ("x @ https://example.org/x.whl",)},
    ],
    ids=str,
)
def test_a_content_that_is_none_is_refused(changed: dict[str, Any], tmp_path: Path) -> None:
    key, _ = new_key(tmp_path / "signer.key")
    content = Content.model_construct(**{"requires": (), **PLAIN, **changed})
    with pytest.raises(TaskBundleRefused):
        read_bundle(signed(content, key))


def test_a_field_that_is_not_known_is_refused_also_if_it_is_signed(tmp_path: Path) -> None:
    key, _ = new_key(tmp_path / "signer.key")
    for more in ({}, {"more": 1}):
        text = json.dumps(PLAIN | more).encode()
        signature = key.sign(CONTEXT + hashlib.sha256(text).digest())
        data = MAGIC + key.public_key().public_bytes_raw() + signature + text
        if not more:
            assert read_bundle(data).content.version == 1
            continue
        with pytest.raises(TaskBundleRefused, match="content is none"):
            read_bundle(data)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_no_byte_of_a_bundle_can_change(data: st.DataObject, tmp_path_factory: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "changed"
    key, _ = new_key(folder / "signer.key")
    whole = signed(Content(**PLAIN), key)
    at = data.draw(st.integers(0, len(whole) - 1))
    change = data.draw(st.integers(1, 255))
    changed = whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :]
    for found in (changed, whole[:at], whole + b" "):
        with pytest.raises(TaskBundleRefused):
            read_bundle(found)


def test_a_folder_of_a_bundle_is_made_the_bundle_s_again(tmp_path: Path) -> None:
    key, text = new_key(tmp_path / "signer.key")
    _, file = publish_code(tmp_path, key, version=1)
    device = device_of(tmp_path, text)
    _, spec = taken(file.read_bytes(), device)
    own = Path(spec.partition(":")[0]).parent
    (own / "sizes.py").write_text("WIDTH = 99\n")
    (own / "numpy.py").write_text("raise SystemExit\n")  # would hide the package
    (own / "parity.py").unlink()
    (own / "parity.py").symlink_to(own / "numpy.py")
    taken(file.read_bytes(), device)
    assert (own / "sizes.py").read_text() == "WIDTH = 8\n"
    assert not (own / "numpy.py").exists()
    assert not (own / "parity.py").is_symlink()


def test_the_list_of_tasks_that_is_damaged_is_no_empty_list(tmp_path: Path) -> None:
    key, text = new_key(tmp_path / "signer.key")
    _, file = publish_code(tmp_path, key, version=1)
    device = device_of(tmp_path, text)
    taken(file.read_bytes(), device)
    index = tmp_path / "state" / FOLDER / INDEX
    index.write_text(json.dumps([{"name": "Parity"}]))
    with pytest.raises(Exception, match="cannot be read"):
        taken(file.read_bytes(), device)


def test_publishing_names_what_cannot_be_published(tmp_path: Path) -> None:
    key, _ = new_key(tmp_path / "keys" / "signer.key")
    spec = write_code(tmp_path)
    with pytest.raises(SettingsError, match="private key"):
        publish(spec, key=key, folder=tmp_path)
    code = tmp_path / "code"
    spec = write_code(code)
    with pytest.raises(SettingsError, match="is not in the folder"):
        publish(spec, key=key, folder=tmp_path / "keys")
    with pytest.raises(TaskBundleRefused, match="names no package"):
        publish(spec, key=key, folder=code, requires=["pandas >"])
    with pytest.raises(UnknownTask):
        publish(f"{code / 'parity.py'}:Missing", key=key, folder=code)
    (code / "data.bin").write_bytes(os.urandom(MAX_BYTES))
    with pytest.raises(TaskBundleRefused, match="may have"):
        publish(spec, key=key, folder=code)
    (code / "data.bin").unlink()
    (code / "link").symlink_to("sizes.py")
    with pytest.raises(SettingsError, match="is a link"):
        publish(spec, key=key, folder=code)


def test_files_beside_the_task_go_along(tmp_path: Path) -> None:
    key, _ = new_key(tmp_path / "keys" / "signer.key")
    spec = write_code(tmp_path / "code")
    (tmp_path / "code" / "test.csv").write_text("a,b\n")
    (tmp_path / "other.csv").write_text("a,b\n")
    names = [tmp_path / "code" / name for name in ("test.csv", "sizes.py")]
    bundle, _ = publish(spec, key=key, beside=names)
    assert set(bundle.content.files) == {"parity.py", "sizes.py", "test.csv"}
    with pytest.raises(SettingsError, match="is not in the folder"):
        publish(spec, key=key, beside=[tmp_path / "other.csv"])


def test_a_folder_beside_the_task_goes_along_with_all_its_files(tmp_path: Path) -> None:
    key, _ = new_key(tmp_path / "signer.key")
    spec = write_code(tmp_path / "code")
    test = tmp_path / "code" / "test"
    (test / "cats").mkdir(parents=True)
    for name in ("cats/1.png", "dogs.txt", ".hidden"):
        (test / name).write_text(name)
    beside = [tmp_path / "code" / "sizes.py", test]
    bundle, _ = publish(spec, key=key, beside=beside, requires=["numpy"])
    assert sorted(bundle.content.files) == [
        *("parity.py", "sizes.py", "test/cats/1.png", "test/dogs.txt")
    ]


def test_versions_follow_those_that_lie_beside_the_task(tmp_path: Path) -> None:
    key, _ = new_key(tmp_path / "signer.key")
    spec = write_code(tmp_path / "code")
    given: dict[str, Any] = {"key": key, "folder": tmp_path / "code"}
    versions = [publish(spec, **given)[0].content.version for _ in range(3)]
    assert versions == [1, 2, 3]
    files = {path.name for path in (tmp_path / "code").glob("*.task")}
    assert files == {"Parity-1.task", "Parity-2.task", "Parity-3.task"}
    assert set(publish(spec, **given)[0].content.files) == {"parity.py", "sizes.py"}


def test_a_bundle_is_not_written_over_other_files_of_its_version(tmp_path: Path) -> None:
    key, _ = new_key(tmp_path / "signer.key")
    first, file = publish(write_code(tmp_path / "code"), key=key, folder=tmp_path / "code")
    again, _ = publish(write_code(tmp_path / "code"), key=key, folder=tmp_path / "code", version=1)
    assert again.digest == first.digest
    wider = write_code(tmp_path / "code", width=9)
    with pytest.raises(SettingsError, match="has other files of version 1 already"):
        publish(wider, key=key, folder=tmp_path / "code", version=1)
    assert read_bundle(file.read_bytes()).digest == first.digest
    place: dict[str, Any] = {"key": key, "folder": tmp_path / "code", "out": tmp_path / "my.task"}
    assert [publish(wider, **place)[0].content.version for _ in range(2)] == [1, 2]


def test_a_task_is_rolled_back_by_publishing_an_earlier_bundle_again(tmp_path: Path) -> None:
    key, trust = new_key(tmp_path / "signer.key")
    code, device = tmp_path / "code", device_of(tmp_path, trust)
    first, file = publish(write_code(code), key=key, folder=code)
    second, _ = publish(write_code(code, width=9), key=key, folder=code)
    taken(first.data, device)
    taken(second.data, device)
    third, path = publish_again(file, key=key)
    assert path.name == "Parity-3.task"
    assert third.content == first.content.model_copy(update={"version": 3})
    assert taken(third.data, device)[0].title == "Parity 3"


def test_another_signer_s_bundle_is_not_signed_again(tmp_path: Path) -> None:
    key, trust = new_key(tmp_path / "signer.key")
    other, _ = new_key(tmp_path / "other.key")
    _, file = publish(write_code(tmp_path / "code"), key=key, folder=tmp_path / "code")
    with pytest.raises(SettingsError, match=f"is signed by {trust}"):
        publish_again(file, key=other)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(TaskBundleRefused, match="changed after it was signed"):
        publish_again(file, key=key)


def test_a_misspelt_key_is_refused_and_not_made(tmp_path: Path) -> None:
    path = tmp_path / "singer.key"
    with pytest.raises(SettingsError, match="there is no signer's key"):
        saved_signer_key(path)
    assert not path.exists()
    path.write_text("a,b\n")
    path.chmod(0o600)
    with pytest.raises(SettingsError, match="has no private key in PEM"):
        saved_signer_key(path)


def test_a_signer_s_key_is_its_owner_s_alone_and_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "signer.key"
    _, is_new = signer_key(path)
    assert is_new
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()
    assert not signer_key(path)[1]
    assert path.read_bytes() == before
    path.chmod(0o644)
    with pytest.raises(SettingsError):
        signer_key(path)
    path.chmod(0o600)
    path.write_text("no key")
    with pytest.raises(SettingsError):
        signer_key(path)


def test_a_key_that_is_none_is_refused_as_a_setting(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no signer's key"):
        device_of(tmp_path, "ssh-ed25519")


def test_the_model_of_a_run_of_a_signed_task_names_the_bundle_s_file_which_loads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path of the operator's state folder would say nothing to others, and be refused here."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    bundle, file = publish_code(tmp_path, new_key(tmp_path / "signer.key")[0], version=2)
    file = file.rename(tmp_path / bundle.file_name)
    task = opened_task(str(file))
    assert task.startswith(str(tmp_path / "state"))
    run = headwater.simulate(task, clients=2, rounds=1, out=tmp_path / "out", progress=False)
    record, _ = read_model(tmp_path / "out/model.safetensors")
    assert record.task == file.name
    for name in (None, file.name):
        found = headwater.load_model(tmp_path / "out", name)
        for one, other in zip(found.parameters(), run.model.parameters(), strict=True):
            assert torch.equal(one, other)
