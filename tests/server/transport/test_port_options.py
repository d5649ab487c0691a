"""gRPC silently ignores unknown options, so the port's are looked up in gRPC itself."""

from pathlib import Path

import grpc._cython.cygrpc

from headwater.server.transport.listener import grpc_options


def test_grpc_knows_each_option_of_the_port() -> None:
    library = Path(grpc._cython.cygrpc.__file__).read_bytes()
    unknown = [name for name, _ in grpc_options() if name.encode() + b"\0" not in library]
    assert unknown == []
