"""What systems and accounts lack is named, with what to set instead."""

from __future__ import annotations

import pytest

from headwater.common.errors import SettingsError
from headwater.common.settings.schema import ClientSettings
from headwater.common.user_code.bundled_examples import expanded


@pytest.fixture(autouse=True)
def _no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(_: object) -> None:
        raise KeyError("no such user")

    pwd = pytest.importorskip("pwd")
    for name in ("HOME", "XDG_STATE_HOME", "USERPROFILE"):
        monkeypatch.delenv(name, raising=False)
    for function in ("getpwuid", "getpwnam"):
        monkeypatch.setattr(pwd, function, unknown)


@pytest.mark.parametrize("path", ["~/data", "~nobody-there/data"])
def test_a_path_in_a_home_folder_that_is_not_there_is_refused_with_what_to_set(path: str) -> None:
    with pytest.raises(SettingsError, match="is in a home folder, and there is none") as refused:
        expanded(path)
    assert "--state" in refused.value.remedy


def test_a_device_without_a_home_folder_is_told_to_name_its_state_folder() -> None:
    with pytest.raises(SettingsError, match="HOME is not set"):
        ClientSettings().state_folder  # noqa: B018 - it raises
