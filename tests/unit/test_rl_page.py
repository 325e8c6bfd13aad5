"""The page `/rl`, in a browser, of a scheduler that is fed by a finished run's log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

import pytest
from distributed import Scheduler

from areal_flow.cluster.placement import Machines
from areal_flow.cluster.pool import WorkerPool
from areal_flow.cluster.registry import Executions
from areal_flow.cluster.rl_page import RunFeed, add_page
from areal_flow.core.layout import RunLayout
from pipelines.cluster_address import dashboard_text, tunnel_to
from tests.browser import WIDTHS, opened, screenshot
from tests.finished_runs import make_finished_run
from tests.flow_parts import Parts

if TYPE_CHECKING:
    from playwright.sync_api import Page

POINTS = """() => Object.fromEntries(
    Bokeh.documents[0].all_models.size && [...Bokeh.documents[0].all_models]
        .filter(model => model.type === 'GlyphRenderer')
        .map(model => [model.glyph.type, model.data_source.get_length()]))"""


class NoLauncher:
    """Starts nothing; a run's log needs no workers."""

    async def stop(self, name: str) -> None: ...


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return make_finished_run(tmp_path_factory.mktemp("runs") / "run", num_steps=12)


async def with_feed(layout: RunLayout, use: Callable[[str, RunFeed], Awaitable[Any]]) -> Any:
    """Start a scheduler with the page of a run; return what a coroutine does with it."""
    async with Scheduler(host="127.0.0.1", port=0, dashboard_address="127.0.0.1:0") as scheduler:
        pool = WorkerPool(scheduler, NoLauncher(), Machines(), Executions(layout.root))  # type: ignore[arg-type]
        feed = RunFeed(layout, pool)
        feed.flow = Parts().flow()
        add_page(scheduler, feed)
        try:
            return await use(f"http://127.0.0.1:{scheduler.http_server.port}", feed)
        finally:
            await pool.stop()


def in_browser(layout: RunLayout, look: Callable[[str, RunFeed], Any]) -> Any:
    """Have a thread look at the page while this one runs the scheduler."""

    async def use(url: str, feed: RunFeed) -> Any:
        return await asyncio.to_thread(look, url, feed)

    return asyncio.run(with_feed(layout, use))


def wait_until_drawn(page: Page) -> None:
    page.get_by_text("step 12").wait_for()
    page.wait_for_function("Bokeh.documents[0].is_idle")


@pytest.mark.parametrize("width", WIDTHS)
def test_page_draws_a_run_at_any_width_without_an_error(
    layout: RunLayout, tmp_path: Path, width: int
) -> None:
    def look(url: str, feed: RunFeed) -> dict[str, int]:
        with opened(f"{url}/rl", width=width) as page:
            wait_until_drawn(page)
            screenshot(page, tmp_path, "rl")
            points: dict[str, int] = page.evaluate(POINTS)
            return points

    points = in_browser(layout, look)
    assert points["Line"] == 12, "a point a step"
    assert points["VSpan"] == 8, "new weights after each of the steps shown"
    assert points["HBar"] > 0


def test_menu_of_dasks_pages_leads_to_the_page_of_the_run(layout: RunLayout) -> None:
    def follow(url: str, feed: RunFeed) -> str:
        with opened(f"{url}/status") as page:
            page.get_by_role("link", name="Rl", exact=True).click()
            wait_until_drawn(page)
            return page.title()

    assert in_browser(layout, follow) == "RL: run"


async def test_nothing_is_read_before_a_first_viewer_and_once_for_all_viewers(
    layout: RunLayout,
) -> None:
    async def use(url: str, feed: RunFeed) -> None:
        await asyncio.sleep(0.2)
        assert feed._read_at == 0.0
        first, second = await asyncio.gather(feed.shown(), feed.shown())
        assert first is second
        assert first["curves"]["step"].to_list() == [*range(1, 13)]

    await with_feed(layout, use)


async def test_page_of_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    layout = make_finished_run(tmp_path / "run", num_steps=0, evaluated=False)

    async def use(url: str, feed: RunFeed) -> None:
        assert await feed.shown() == {}

    await with_feed(layout, use)


async def test_only_new_steps_are_read_again(tmp_path: Path) -> None:
    layout = make_finished_run(tmp_path / "run", num_steps=3)

    async def use(url: str, feed: RunFeed) -> None:
        before = (await feed.shown())["curves"]
        feed._read_at = 0.0
        after = (await feed.shown())["curves"]
        assert after["step"].to_list() == before["step"].to_list() == [1, 2, 3]

    await with_feed(layout, use)


def test_an_ssh_session_is_shown_how_to_reach_the_dashboard() -> None:
    url = "http://127.0.0.1:8787/rl"
    assert dashboard_text(url, {}) == f"Dask dashboard: {url}"
    first, tunnel = dashboard_text(url, {"SSH_CONNECTION": "10.0.0.5 51234 10.0.0.9 22"}).split(
        "\n"
    )
    assert first == f"Dask dashboard: {url}"
    assert "ssh -N -p 22 -L 8787:127.0.0.1:8787 " in tunnel
    assert tunnel.endswith("@10.0.0.9")
    assert tunnel_to(url, {}) == f"ssh -N -L 8787:127.0.0.1:8787 {gethostname()}"
