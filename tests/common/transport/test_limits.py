"""gRPC passes over an option that it does not know, without a word."""

from pathlib import Path

import grpc._cython.cygrpc
import pytest

from headwater.common.transport.limits import CHANNEL


@pytest.mark.parametrize("name", [name for name, _ in CHANNEL])
def test_grpc_knows_the_option(name: str) -> None:
    library = Path(grpc._cython.cygrpc.__file__).read_bytes()
    assert name.encode() + b"\0" in library
