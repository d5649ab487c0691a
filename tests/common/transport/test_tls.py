"""Addresses as the settings have them."""

from __future__ import annotations

import pytest

from headwater.common.errors import SettingsError
from headwater.common.transport.tls import split_address, split_addresses


def test_a_device_s_addresses_are_split_at_their_commas() -> None:
    assert split_addresses("pi:8500") == ("pi:8500",)
    assert split_addresses("pi:8500, [::1]:8501") == ("pi:8500", "[::1]:8501")


@pytest.mark.parametrize("text", ["", "pi", "pi:8500,", "pi:8500,nas", "pi:8500,pi:8500"])
def test_a_list_with_no_address_or_one_named_twice_is_refused(text: str) -> None:
    with pytest.raises(SettingsError):
        split_addresses(text)


def test_a_single_address_is_no_list() -> None:
    with pytest.raises(SettingsError):
        split_address("pi:8500,nas:8500")
