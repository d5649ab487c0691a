"""``lock_torch.py LOCK INDEX``: write deploy/torch.txt, the CPU builds of torch with their SHA-256.

``make hashes`` runs this. For arm64 the build is in the registry, for amd64 in PyTorch's own index,
as the registry's brings CUDA. LOCK is the command of uv that locks requirements. A part whose index
cannot be reached is kept as it stands, and named.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

FILE = Path(__file__).parent / "torch.txt"
HEAD = "# CPU builds of torch; written by `make hashes`.\n"
ARM = ("torch==2.9.1", "platform_machine == 'aarch64'")
AMD = ("torch==2.13.0+cpu", "platform_machine == 'x86_64'")


def locked(lock: list[str], requirement: str, marker: str) -> str | None:
    """Return a requirement's lines with hashes; None if its index cannot be reached."""
    command = [*lock, "--no-deps", "-"]
    text = f"{requirement} ; {marker}\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{requirement}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)
        return None
    return done.stdout


def parts(text: str) -> dict[str, str]:
    """Return the lines of each requirement of the file, by its marker."""
    found: dict[str, str] = {}
    marker = ""
    for line in text.splitlines(keepends=True):
        if line.startswith("torch=="):
            marker = line.partition(" ; ")[2].rstrip("\\\n ")
        if marker:
            found[marker] = found.get(marker, "") + line
    return found


def main() -> None:
    """Lock both builds, and write the file."""
    lock, index = shlex.split(sys.argv[1]), sys.argv[2]
    kept = parts(FILE.read_text()) if FILE.exists() else {}
    for (requirement, marker), places in ((ARM, []), (AMD, ["--index-url", index])):
        fresh = locked([*lock, *places], requirement, marker)
        if fresh is None:
            print(f"deploy/torch.txt: {requirement} is kept as it stands", file=sys.stderr)
        else:
            kept[marker] = fresh
    FILE.write_text(HEAD + "".join(kept[marker] for _, marker in (ARM, AMD) if marker in kept))


if __name__ == "__main__":
    main()
