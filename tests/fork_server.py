"""Forks a virtual environment's commands from a process that has torch, flwr and scikit-learn.

A SuperNode starts a command for each message, and of its 3.6 s of CPU time 3 s were imports. A
process is forked for each all the same: nothing but modules that are not Headwater's is shared.
``make_preloaded`` puts a small script in a command's place. It sends its arguments, environment and
folder to this server with its output streams, waits, and ends with the status of the fork.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import socket
import sys
from pathlib import Path

STAND_IN = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    socket.send_fds(server, [b" "], [1, 2])
    server.sendall(json.dumps([{script!r}, sys.argv, os.getcwd(), dict(os.environ)]).encode())
    server.shutdown(socket.SHUT_WR)
    status = server.recv(1)
sys.exit(status[0] if status else "its process was killed")
"""


def make_preloaded(command: Path, address: Path) -> None:
    """Let a command of a virtual environment be forked by the server at this address."""
    script = command.with_name(f"{command.name}.script")
    command.rename(script)
    fields = {"python": command.with_name("python"), "address": str(address)}
    command.write_text(STAND_IN.format(script=str(script), **fields))
    command.chmod(0o755)


def serve(address: Path) -> str:
    """Fork a process for each connection, and return in it alone: the script that it is to run."""
    import flwr.superlink.cli
    import flwr.supernode.cli  # noqa: F401
    import sklearn.datasets  # noqa: F401
    import torch  # noqa: F401

    gc.freeze()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        server.listen(16)
        while True:
            connection, _ = server.accept()
            with connection:
                if watcher := os.fork():
                    os.waitpid(watcher, 0)
                elif os.fork():
                    os._exit(0)  # so that the server need not wait for it
                elif process := os.fork():
                    _, status = os.waitpid(process, 0)
                    connection.sendall(bytes([os.waitstatus_to_exitcode(status) & 0xFF]))
                    os._exit(0)
                else:
                    return become(connection)


def become(connection: socket.socket) -> str:
    """Take over what a stand-in sent, and return its command's script."""
    _, streams, _, _ = socket.recv_fds(connection, 1, 2)
    for stream, number in zip(streams, (1, 2), strict=True):
        os.dup2(stream, number)
        os.close(stream)
    with connection.makefile() as text:
        script, sys.argv, folder, environment = json.load(text)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    return str(script)


if __name__ == "__main__":
    runpy.run_path(serve(Path(sys.argv[1])), run_name="__main__")
