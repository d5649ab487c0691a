"""gRPC silently ignores unknown options, so each option name is looked up in gRPC itself."""

from collections.abc import Sequence
from pathlib import Path

import grpc._cython.cygrpc
import pytest

from headwater.common.transport.limits import (
    GRPC_OPTIONS,
    channel_options,
    named_version,
    same_version,
)


@pytest.mark.parametrize("name", [name for name, _ in channel_options(has_standby=True)])
def test_grpc_knows_the_option(name: str) -> None:
    library = Path(grpc._cython.cygrpc.__file__).read_bytes()
    assert name.encode() + b"\0" in library


@pytest.mark.parametrize(
    ("options", "most_seconds"),
    [
        (GRPC_OPTIONS, 60),
        (channel_options(has_standby=False), 60),
        (channel_options(has_standby=True), 15),
    ],
    ids=["server", "device", "device with a standby"],
)
def test_every_wait_for_a_peer_s_answer_to_a_ping_ends_in_the_time_of_the_docs(
    options: Sequence[tuple[str, int]], most_seconds: int
) -> None:
    chosen = dict(options)
    silence = chosen["grpc.keepalive_time_ms"]
    for timeout in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):
        assert silence + chosen[timeout] <= 1000 * most_seconds


@pytest.mark.parametrize("text", ["0.2.0", "1.10", "0.2.0rc1", "0.2.0.dev3+g1a2b"])
def test_a_version_is_named_with_what_makes_a_device_s_the_same(text: str) -> None:
    assert named_version(text) == f" (headwater {text})"
    assert same_version(text).startswith(f"install headwater {text} on the device: ")


@pytest.mark.parametrize("text", ["", "latest", "0.2.0; rm -rf /", "1" * 80, "0.2\n[bold]"])
def test_the_other_side_s_word_that_is_no_version_is_not_repeated(text: str) -> None:
    assert named_version(text) == ""
    assert same_version(text) == "install the server's version of headwater on the device"
