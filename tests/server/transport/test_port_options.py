"""gRPC silently ignores unknown options, so the port's are looked up in gRPC itself."""

import tomllib
from pathlib import Path

import grpc._cython.cygrpc
from packaging.requirements import Requirement

from headwater.server.transport.listener import grpc_options


def test_grpc_knows_each_option_of_the_port() -> None:
    library = Path(grpc._cython.cygrpc.__file__).read_bytes()
    unknown = [name for name, _ in grpc_options() if name.encode() + b"\0" not in library]
    assert unknown == []


def test_no_grpc_without_the_bound_of_read_buffers_can_be_installed() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    required = {one.name: one for one in map(Requirement, project["dependencies"])}["grpcio"]
    assert not required.specifier.contains("1.83.2")
    assert required.specifier.contains("1.84.0")
