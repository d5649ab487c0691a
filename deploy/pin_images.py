"""``pin_images.py``: write the digest of each public image into Dockerfile and compose.yaml.

A tag may be moved to another image; a digest names one image. ``make digests`` runs this where
Docker and the registry are at hand, and shows what changed; look at it before you commit it. A
digest is that of the image for all platforms. Run again, it takes the tags' newest images.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

DEPLOY = Path(__file__).parent
FILES = (DEPLOY / "Dockerfile", DEPLOY / "compose.yaml")
# An image with a tag: ours have none. FROM names a stage too, which has no tag either.
IMAGE = re.compile(r"^(\s*(?:image:|FROM)\s+)([\w./-]+:[\w.-]+)(@sha256:[0-9a-f]+)?", re.M)
DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def digest_of(image: str) -> str:
    """Ask Docker for an image's digest.

    Raises:
        SystemExit: Docker cannot tell.
    """
    command = ["docker", "buildx", "imagetools", "inspect", image]
    try:
        asked = subprocess.run(
            [*command, "--format", "{{.Manifest.Digest}}"],
            capture_output=True,
            text=True,
            check=True,
        )
    except OSError as error:
        sys.exit(f"docker does not start: {error.strerror}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"docker knows no digest of {image}: {error.stderr.strip()}")
    digest = asked.stdout.strip()
    if not DIGEST.fullmatch(digest):
        sys.exit(f"docker gave {digest!r} for {image}, expected sha256:...")
    return digest


def images_in(text: str) -> list[str]:
    """Return the public images that a file names, without digests."""
    return [match[2] for match in IMAGE.finditer(text)]


def pinned(text: str, digests: dict[str, str]) -> str:
    """Return a file's text with these digests behind the images' tags."""
    return IMAGE.sub(lambda match: f"{match[1]}{match[2]}@{digests[match[2]]}", text)


def main() -> None:
    """Ask for all digests, then write the files: all of them or none."""
    files = [Path(name) for name in sys.argv[1:]] or list(FILES)
    texts = {file: file.read_text() for file in files}
    images = sorted({image for text in texts.values() for image in images_in(text)})
    digests = {image: digest_of(image) for image in images}
    for file, text in texts.items():
        file.write_text(pinned(text, digests))
    for image, digest in digests.items():
        print(f"{image}@{digest}")


if __name__ == "__main__":
    main()
