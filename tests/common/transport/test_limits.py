"""gRPC silently ignores unknown options, so each option name is looked up in gRPC itself."""

from pathlib import Path

import grpc._cython.cygrpc
import pytest

from headwater.common.transport.limits import channel_options


@pytest.mark.parametrize("name", [name for name, _ in channel_options(has_standby=True)])
def test_grpc_knows_the_option(name: str) -> None:
    library = Path(grpc._cython.cygrpc.__file__).read_bytes()
    assert name.encode() + b"\0" in library
