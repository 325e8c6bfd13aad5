"""The guides' pictures of `areal-flow view`: its first page and a group, or a group with tools.

python -m benchmarks.view_pictures docs/images runs/NAME [runs/OTHER]
python -m benchmarks.view_pictures docs/images runs/NAME --tools
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
    parser.add_argument("--tools", action="store_true", help="a group that calls tools")
    given = parser.parse_args()
    first, group = (None, "view_tools.png") if given.tools else ("view_runs.png", "view_group.png")
    tools = "len(tool_calls) > 1 AND reward = 1 AND member = 0"
    condition = tools if given.tools else "len(version_spans) > 1"
    with served_view(*given.runs) as url, opened(url) as page:
        page.locator(".tabulator-row").first.wait_for()
        page.get_by_label("order").select_option("most unequal rewards")
        page.get_by_label("SQL condition").fill(condition)
        page.get_by_label("SQL condition").press("Enter")
        page.wait_for_timeout(3000)
        if first:
            page.screenshot(path=given.folder / first)
        page.locator(".tabulator-row").first.click()
        page.get_by_text("expected").first.wait_for()
        place = "start" if given.tools else "center"
        colour = page.get_by_label("colour tokens by")
        colour.evaluate(f"field => field.scrollIntoView({{block: '{place}'}})")
        if not given.tools:
            page.mouse.wheel(0, 400)
        page.wait_for_timeout(1500)
        page.screenshot(path=given.folder / group)
    for name in filter(None, (first, group)):
        Image.open(given.folder / name).quantize(128).save(given.folder / name, optimize=True)


if __name__ == "__main__":
    main()
