"""The guide's picture of the page `/rl`, taken while the default recipe trains.

python -m benchmarks.rl_page_picture docs/images/rl_page.png
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.browser import opened

SHOWN_STEP = re.compile(r"step 4\d\.")
SIZE: Any = {"width": 1280, "height": 745}
TIMEOUT_MS = 300_000


def take_picture(url: str, picture: Path) -> None:
    with opened(url) as page:
        page.set_viewport_size(SIZE)
        page.get_by_text(SHOWN_STEP).wait_for(timeout=TIMEOUT_MS)
        page.screenshot(path=picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-m", "areal_flow", "train", "--name", "sums", "--runs", runs]
        driver = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert driver.stdout is not None
        for line in driver.stdout:
            if address := re.search(r"Dask dashboard: (\S+)", line):
                take_picture(address[1], given.picture)
        driver.wait()


if __name__ == "__main__":
    main()
