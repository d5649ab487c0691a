"""Which proxy leads to a server: the first of gRPC's variables, and none to this machine."""

from __future__ import annotations

import pytest

from headwater.common.transport.proxy import proxy_of

PROXY = "http://gate.example.org:3128"


@pytest.mark.parametrize("variable", ["grpc_proxy", "https_proxy", "http_proxy"])
def test_each_variable_of_grpc_names_a_proxy(variable: str) -> None:
    found = proxy_of("river.example.org", {variable: PROXY})
    assert found is not None
    assert (found.host, found.port, found.variable) == ("gate.example.org", 3128, variable)
    assert found.uri == PROXY


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_needs_no_proxy(host: str) -> None:
    assert proxy_of(host, {"http_proxy": PROXY}) is None


@pytest.mark.parametrize(
    ("host", "exempt"),
    [
        ("river.example.org", "river.example.org"),
        ("river.example.org", "other.net, .example.org"),
        ("river.example.org", "*.example.org"),
        ("River.example.org", "example.ORG"),
        ("10.1.2.3", "10.0.0.0/8"),
        ("fd00::1", "fd00::/8"),
        ("river.example.org", "*"),
    ],
)
def test_no_proxy_names_hosts_domains_and_networks(host: str, exempt: str) -> None:
    assert proxy_of(host, {"http_proxy": PROXY, "no_proxy": exempt}) is None
    assert proxy_of("elsewhere.com", {"http_proxy": PROXY, "no_proxy": "example.org"}) is not None


@pytest.mark.parametrize("text", ["", "socks5://gate:1080", "https://gate:443", "http://gate:x"])
def test_a_proxy_that_grpc_cannot_use_is_none(text: str) -> None:
    assert proxy_of("river.example.org", {"http_proxy": text}) is None


def test_a_proxy_s_password_reaches_the_proxy_and_no_message() -> None:
    found = proxy_of("river.example.org", {"http_proxy": "ada:s%40cret@gate:8080"})
    assert found is not None
    assert found.user == "ada:s@cret"
    assert found.uri == "http://ada:s%40cret@gate:8080"
    assert "cret" not in str(found)
