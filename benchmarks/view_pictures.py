"""The guide's pictures of `areal-flow view`: its first page, and a group; of one or two runs.

python -m benchmarks.view_pictures docs/images runs/NAME [runs/OTHER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image

from tests.browser import opened
from tests.served_views import served_view


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    given = parser.parse_args()
    with served_view(*given.runs) as url, opened(url) as page:
        page.locator(".tabulator-row").first.wait_for()
        page.get_by_label("order").select_option("most unequal rewards")
        page.get_by_label("SQL condition").fill("len(version_spans) > 1")
        page.get_by_label("SQL condition").press("Enter")
        page.wait_for_timeout(3000)
        page.screenshot(path=given.folder / "view_runs.png")
        page.locator(".tabulator-row").first.click()
        page.get_by_text("expected").first.wait_for()
        colour = page.get_by_label("colour tokens by")
        colour.evaluate("field => field.scrollIntoView({block: 'center'})")
        page.mouse.wheel(0, 400)
        page.wait_for_timeout(1500)
        page.screenshot(path=given.folder / "view_group.png")
    for name in ("view_runs.png", "view_group.png"):
        Image.open(given.folder / name).quantize(128).save(given.folder / name, optimize=True)


if __name__ == "__main__":
    main()
