"""``run_dockerfile.py TREE``: carry out deploy/Dockerfile step by step, where no engine is at hand.

For those who change the Dockerfile: as root on Linux, with TREE a clean Debian tree that stands for
its ``FROM debian``:

    debootstrap --variant=minbase bookworm TREE
    python tests/deploy/run_dockerfile.py TREE --arg PIP_FIND_LINKS=/opt/wheels --bind /opt/wheels

A TREE of arm64 (debootstrap --arch=arm64) runs under qemu-user and binfmt_misc as a Cortex-A53, the
Raspberry Pi 3's, and the two rounds are repeated on a Cortex-A72 (Raspberry Pi 4): the default
processor of qemu has instructions that these boards lack.

Every stage is an overlay over the one that it is FROM, so TREE stays clean. Steps are read as
Docker reads them (docs.docker.com/reference/dockerfile); one that is not known here is an error. At
the end each target starts with its root read-only, as its user, in its working folder, with its CMD
replaced by --help, and its health check is tried, which must fail as nothing runs. Then a server
and a client of those stages train together for two rounds over this machine's loopback.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
TARGETS = ("server", "client")
BOARDS = ("cortex-a53", "cortex-a72")
UNKNOWN_TO_A_TREE = {"EXPOSE", "STOPSIGNAL", "VOLUME"}

TASK = "examples/synthetic.py:Synthetic"
ADDRESS = "127.0.0.1:8577"
TOGETHER = {
    "server": f"--task {TASK} --listen {ADDRESS} --min-clients 1 --rounds 2 --accumulation-steps 2 "
    "--out /tmp/run",
    "client": f"--task {TASK} --server {ADDRESS} --num-parts 1 --state /tmp/state --patience 120",
}

Step = tuple[str, str]


def steps(text: str) -> list[Step]:
    """Return the Dockerfile's steps: instruction and argument, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found = [line.strip().partition(" ") for line in joined.splitlines() if line.strip()]
    return [(word.upper(), rest.strip()) for word, _, rest in found]


@dataclass(kw_only=True)
class Stage:
    """A stage in the making: its root, and what its steps have set."""

    root: Path
    layers: list[Path]  # the topmost first
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: list[str] = field(default_factory=list)
    health: list[str] = field(default_factory=list)


class Engine:
    """Carries out steps in overlays over one clean tree."""

    def __init__(
        self,
        tree: Path,
        room: Path,
        *,
        args: dict[str, str],
        environment: dict[str, str],
        binds: list[Path],
    ) -> None:
        self._tree, self._room, self._args, self._binds = tree, room, args, binds
        self.environment = environment  # of every step
        self._mounted: list[Path] = []
        self.stages: dict[str, Stage] = {}

    def carry_out(self, all_steps: list[Step]) -> None:
        """Carry out every step of every stage.

        Raises:
            subprocess.CalledProcessError: a RUN failed.
            ValueError: an instruction that is not known here.
        """
        stage: Stage | None = None
        for word, rest in all_steps:
            print(f"-> {word} {rest[:110]}", flush=True)
            if word == "FROM":
                stage = self._begin(rest)
                continue
            assert stage is not None
            self._step(stage, word, rest)

    def _step(self, stage: Stage, word: str, rest: str) -> None:
        match word:
            case "RUN":
                self.run(stage, ["/bin/sh", "-c", rest])
            case "COPY":
                self._copy(stage, rest)
            case "ARG":
                name, _, default = rest.partition("=")
                value = self._args.get(name, default.strip('"') if "=" in rest else None)
                if value is not None:
                    stage.environment[name] = value
            case "ENV":
                pairs = _pairs(shlex.split(rest))
                stage.environment.update(pairs)
            case "WORKDIR":
                stage.workdir = rest
                (stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                stage.user = rest
            case "ENTRYPOINT":
                stage.entrypoint = json.loads(rest)
            case "HEALTHCHECK":
                stage.health = json.loads(rest[rest.index("CMD ") + 4 :])
            case "CMD":
                json.loads(rest)
            case _ if word not in UNKNOWN_TO_A_TREE:
                raise ValueError(f"the Dockerfile's {word} is not known here")

    def _begin(self, rest: str) -> Stage:
        image, _, name = rest.partition(" AS ")
        below = self.stages.get(image)
        if below is None and not image.startswith("debian:"):
            raise ValueError(f"the tree stands for debian, not for {image}")
        layers = [self._tree] if below is None else below.layers
        root, upper = self._overlay(layers, name)
        stage = Stage(root=root, layers=[upper, *layers])
        if below is not None:
            stage.environment = dict(below.environment)
            stage.workdir, stage.user = below.workdir, below.user
            stage.entrypoint = below.entrypoint
        self.stages[name] = stage
        return stage

    def _overlay(self, layers: list[Path], name: str) -> tuple[Path, Path]:
        """Mount an overlay over all layers at once: the kernel stacks no more than two."""
        root, upper, work = (self._room / name / part for part in ("root", "upper", "work"))
        for folder in (root, upper, work):
            folder.mkdir(parents=True)
        lower = ":".join(str(layer) for layer in layers)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, root], check=True)
        self._mounted.append(root)
        return root, upper

    def _copy(self, stage: Stage, rest: str) -> None:
        words = rest.split()
        source = ROOT
        if words[0].startswith("--from="):
            source = self.stages[words.pop(0).removeprefix("--from=")].root
        *names, target = words
        goal = stage.root / target.lstrip("/")
        for name in names:
            origin = source / name.lstrip("/")
            if source == ROOT and not _is_sent(name):
                raise ValueError(f"{name} is not in the context: Dockerfile.dockerignore")
            if origin.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.pem") if source == ROOT else None
                shutil.copytree(origin, goal, symlinks=True, ignore=ignored, dirs_exist_ok=True)
            else:
                into = goal / origin.name if target.endswith("/") else goal
                into.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(origin, into)

    def run(
        self, stage: Stage, command: list[str], *, user: str = "0:0", is_read_only: bool = False
    ) -> None:
        """Run a command in a stage, in namespaces of its own.

        Raises:
            subprocess.CalledProcessError: its exit status is not 0.
        """
        root = shlex.quote(str(stage.root))
        setup = [f"mount --bind {root} {root}", f"mount -t proc proc {root}/proc"]
        setup += [f"mount --rbind /dev {root}/dev", f"mount -t tmpfs tmpfs {root}/tmp"]
        for bind in self._binds:
            inside = f"{root}/{shlex.quote(str(bind).lstrip('/'))}"
            setup += [f"mkdir -p {inside}", f"mount --bind {shlex.quote(str(bind))} {inside}"]
        setup += [f"touch {root}/etc/resolv.conf"]
        setup += [f"mount --bind /etc/resolv.conf {root}/etc/resolv.conf"]
        if is_read_only:
            setup += [f"mount -o remount,bind,ro {root}"]
        inside = f"cd {shlex.quote(stage.workdir)} && exec {shlex.join(command)}"
        known = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
        environment = {**known, **self.environment, **stage.environment}
        given = shlex.join(f"{name}={value}" for name, value in environment.items())
        outer = f"exec chroot --userspec={user} {root} /usr/bin/env -i {given}"
        setup += [f"{outer} /bin/sh -c {shlex.quote(inside)}"]
        subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--", "sh", "-ec", "\n".join(setup)],
            check=True,
        )

    def close(self) -> None:
        """Unmount all stages, the last first."""
        for root in reversed(self._mounted):
            subprocess.run(["umount", root], check=True)


def _pairs(words: list[str]) -> dict[str, str]:
    """Read NAME=VALUE."""
    return dict(word.split("=", 1) for word in words)


def _is_sent(name: str) -> bool:
    """Whether Dockerfile.dockerignore lets a path of the checkout into the context."""
    is_sent = True
    for line in DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines():
        pattern = line.strip()
        if pattern and not pattern.startswith("#") and fnmatch(name, pattern.lstrip("!")):
            is_sent = pattern.startswith("!")
    return is_sent


def try_out(engine: Engine, name: str) -> None:
    """Start a target as an engine would, with --help, and try its health check."""
    stage = engine.stages[name]
    if stage.user.split(":")[0] == "0":
        raise ValueError(f"{name} would run as root")
    print(f"== {name}: {shlex.join(stage.entrypoint)} --help, health {shlex.join(stage.health)}")
    engine.run(stage, [*stage.entrypoint, "--help"], user=stage.user, is_read_only=True)
    try:
        engine.run(stage, stage.health, user=stage.user, is_read_only=True)
    except subprocess.CalledProcessError as error:
        if error.returncode not in (1, 2):
            raise
        print(f"{name} is not healthy as nothing runs, as it should be")
    else:
        raise ValueError(f"{name} is healthy, and nothing runs")


def train_together(engine: Engine) -> None:
    """Let a server and a client take part in one run, each in its own stage.

    Raises:
        subprocess.CalledProcessError: one of them failed.
    """
    print("== server and client: two rounds", flush=True)

    def take_part(name: str) -> None:
        stage = engine.stages[name]
        command = [*stage.entrypoint, *shlex.split(TOGETHER[name])]
        engine.run(stage, command, user=stage.user, is_read_only=True)

    with ThreadPoolExecutor(len(TARGETS)) as pool:
        list(pool.map(take_part, TARGETS))


def main() -> None:
    """Read the arguments and carry out the Dockerfile."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path)
    parser.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--bind", action="append", default=[], type=Path)
    chosen = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("this mounts and changes root: run it as root")
    room = Path(tempfile.mkdtemp(prefix="dockerfile-"))
    loader = "ld-linux-aarch64.so.1"
    is_arm = any((chosen.tree / folder / loader).exists() for folder in ("lib", "usr/lib"))
    boards = BOARDS if is_arm else ()
    engine = Engine(
        chosen.tree.resolve(),
        room,
        args=_pairs(chosen.arg),
        environment={**_pairs(chosen.env), **({"QEMU_CPU": boards[0]} if boards else {})},
        binds=chosen.bind,
    )
    try:
        engine.carry_out(steps(DOCKERFILE.read_text()))
        for name in TARGETS:
            try_out(engine, name)
        train_together(engine)
        for board in boards[1:]:
            engine.environment["QEMU_CPU"] = board
            train_together(engine)
        for name, stage in engine.stages.items():
            size = sum(file.lstat().st_size for file in stage.layers[0].rglob("*"))
            print(f"{name}: {size / 1e6:.0f} MB on top")
    finally:
        engine.close()
        shutil.rmtree(room)


if __name__ == "__main__":
    main()
