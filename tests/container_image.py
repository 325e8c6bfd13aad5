"""Make an image for containers from this Debian's or Ubuntu's own packages.

`python tests/container_image.py NAME`; it has bash, coreutils, grep, tar and Python.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = (
    "base-files", "bash", "coreutils", "grep", "libacl1", "libattr1", "libbz2-1.0", "libc6",
    "libcrypt1", "libexpat1", "libffi8", "libgmp10", "liblzma5", "libpcre2-8-0", "libselinux1",
    "libsqlite3-0", "libtinfo6", "libuuid1", "python3-minimal", "tar", "zlib1g",
)  # fmt: skip
PYTHON = ("python3.{}-minimal", "libpython3.{}-minimal", "libpython3.{}-stdlib")


def make_image(name: str) -> None:
    show = ["apt-cache", "depends", "python3-minimal"]
    depends = subprocess.run(show, check=True, capture_output=True, text=True).stdout
    (minor,) = {word[8:-8] for word in depends.split() if word.startswith("python3.")}
    packages = [*PACKAGES, *(package.format(minor) for package in PYTHON)]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "-qq", *packages], check=True, cwd=folder)
        root = Path(folder) / "root"
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", package, root], check=True)
        for place in ("tmp", "proc", "sys", "dev"):
            (root / place).mkdir(exist_ok=True)
        with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as archive:
            subprocess.run(["podman", "import", "-q", "-", name], check=True, stdin=archive.stdout)


if __name__ == "__main__":
    make_image(sys.argv[1])
