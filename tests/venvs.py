"""Virtual environments that have every dependency of Headwater, and not Headwater itself.

A ``.pth`` line names the site-packages of this environment. Python does not read the ``.pth`` files
of a folder that it learns of in this way, so an editable installation of Headwater stays unknown.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("flwr*", "flower*", "ray*")


def make_venv(folder: Path) -> Path:
    """Make such an environment and return its ``bin`` folder, with Flower's and Ray's commands."""
    venv.create(folder, with_pip=False)
    scheme = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", vars=scheme))
    (own / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    bin_folder = folder / "bin"
    for pattern in COMMANDS:
        for command in Path(sys.executable).parent.glob(pattern):
            text = command.read_text()
            _, _, rest = text.partition("\n")
            copy = bin_folder / command.name
            copy.write_text(f"#!{bin_folder / 'python'}\n{rest}")
            copy.chmod(0o755)
    return bin_folder


def build_wheel(folder: Path) -> Path:
    """Build the wheel of the files that git tracks, and return its path."""
    source = folder / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in filter(None, tracked.stdout.split("\0")):
        target = source / name
        if not os.path.lexists(ROOT / name):
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            target.symlink_to((ROOT / name).readlink())
        else:
            target.write_bytes((ROOT / name).read_bytes())
    pip(
        *("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)),
        str(source),
    )
    return next(folder.glob("headwater-*.whl"))


def install(wheel: Path, bin_folder: Path) -> None:
    """Install a wheel into an environment of ``make_venv``."""
    pip(
        *("--python", str(bin_folder / "python"), "install"),
        *("--no-deps", "--ignore-installed", str(wheel)),
    )


def pip(*arguments: str) -> None:
    """Run this environment's pip, without a look at any index."""
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(
        command, env={**os.environ, "PIP_NO_INDEX": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
