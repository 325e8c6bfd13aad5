"""`areal-flow view` in a browser: clicks, hostile texts, and refused connections."""

from __future__ import annotations

import http.client
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import polars as pl
import pytest

from tests.browser import WIDTHS, opened, screenshot
from tests.finished_runs import make_finished_run
from tests.served_views import served_view
from tests.unit.test_view import add_step

if TYPE_CHECKING:
    from playwright.sync_api import Locator

pytest.importorskip("panel", reason="panel is not installed")
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")


def click_until_shown(clicked: Locator, shown: Locator) -> None:
    """Click as often as a user would: a table that is drawn anew during a click does not get it."""
    for _ in range(6):
        clicked.click()
        with suppress(playwright.TimeoutError):
            # The first group that is opened waits for torch to be imported.
            shown.wait_for(timeout=15_000)
            return
    pytest.fail("six clicks showed nothing")


@pytest.mark.slow
def test_open_filter_open_a_group_colour_export(tmp_path: Path) -> None:
    going_on = make_finished_run(tmp_path / "going-on", num_steps=3, state="crashed")
    second = make_finished_run(tmp_path / "other", num_steps=2)
    with served_view(going_on.root, second.root) as url:
        for width in WIDTHS:
            with opened(url, width=width) as page:
                page.on("dialog", lambda dialog: pytest.fail(f"a script ran: {dialog.message}"))
                page.locator("canvas").first.wait_for()
                rows = page.locator(".tabulator-row")
                rows.nth(4).wait_for()
                condition = page.get_by_label("SQL condition")
                condition.fill("rewrd = 1")
                condition.press("Enter")
                page.get_by_text('column "rewrd" not found').wait_for()
                assert rows.count() == 5
                condition.fill("prompt_id = 'prompt-2'")
                condition.press("Enter")
                page.get_by_text("2 of 2 matching groups").wait_for()
                # The table is drawn after the text, and moves up when the error is gone.
                rows.nth(2).wait_for(state="detached")
                page.get_by_text('column "rewrd" not found').wait_for(state="detached")
                click_until_shown(rows.first, page.get_by_text("Group 2 of going-on"))
                for colour_by in ("log-prob", "policy version"):
                    page.get_by_label("colour tokens by").select_option(colour_by)
                    titled = "log-prob -0.500" if colour_by == "log-prob" else "version 1"
                    page.locator(f"[title^='{titled}']").first.wait_for()
                with page.expect_download() as download:
                    page.get_by_text("Export rows").click()
                assert download.value.suggested_filename == "trajectories.parquet"
                exported = pl.read_parquet(download.value.path())
                assert exported["run"].to_list() == ["going-on"] * 2 + ["other"] * 2
                screenshot(page, tmp_path, "group")
                page.locator(".bk-tab").get_by_text("Two policies").click()
                page.get_by_text("<script>alert(1)</script>").first.wait_for()
                page.locator(".bk-tab").get_by_text("Lineage").click()
                page.get_by_role("button", name="Show its lineage").click()
                page.get_by_text("Version 3 of going-on").wait_for()
                screenshot(page, tmp_path, "lineage")
        with opened(url) as page:
            page.get_by_text("5 of 5 matching groups").wait_for()
            add_step(going_on, 4)
            # A refresh on a busy machine is slow, and up to MAX_PAUSE_S lie between two of them.
            page.get_by_text("6 of 6 matching groups").wait_for(timeout=90_000)
            page.get_by_text("going-on: step 4").wait_for()


def websocket_status(url: str, origin: str) -> int:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    token = {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==", "Origin": origin}
    connection.request("GET", "/ws", headers={**upgrade, **token})
    return connection.getresponse().status


@pytest.mark.slow
def test_pages_of_other_sites_get_no_websocket(tmp_path: Path) -> None:
    run = make_finished_run(tmp_path / "run", num_steps=1, evaluated=False)
    with served_view(run.root) as url:
        assert websocket_status(url, "http://evil.example") == 403
        assert websocket_status(url, url.rstrip("/")) != 403
