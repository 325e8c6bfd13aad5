"""The real Prometheus scrapes a real run: alerts and panels name only series that arrive."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import urljoin

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

import areal_flow
from areal_flow.core.layout import RunLayout
from tests.integration.runs import resume_while, run_while, small_recipe, step_reached

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra" / "monitoring"
ALERTS_TEST = ROOT / "tests" / "data" / "alerts_test.yml"
SERIES = re.compile(r"\b(?:areal_flow|dask|process|up)\w*")
LIMIT_S = 60.0
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="the programs prometheus and promtool are not installed",
)


def alerts() -> dict[str, str]:
    """Return the expressions of alerts by name."""
    text = (INFRA / "alerts.yml").read_text()
    return dict(re.findall(r"- alert: (\w+)\n\s+expr: (.+)\n", text))


def panels() -> dict[str, list[str]]:
    """Return the expressions of the dashboard's panels by title."""
    dashboard = json.loads((INFRA / "dashboard.json").read_text())
    return {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in dashboard["panels"]
    }


@needs_prometheus
def test_alerts_fire_when_they_should_and_only_then() -> None:
    done = subprocess.run(
        ["promtool", "test", "rules", str(ALERTS_TEST)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = ALERTS_TEST.read_text()
    for name in alerts():
        assert re.search(rf"- alertname: {name}\n\s+eval_time: .*\n\s+exp_alerts:", text), name


class Prometheus:
    """The Prometheus process and its HTTP API."""

    def __init__(self, port: int, session: aiohttp.ClientSession) -> None:
        self._at = f"http://127.0.0.1:{port}/api/v1"
        self._session = session

    async def get(self, path: str, **query: str) -> Any:
        async with self._session.get(f"{self._at}/{path}", params=query) as answer:
            content = await answer.json()
            assert content["status"] == "success", content
            return content["data"]

    async def values(self, expression: str) -> list[float]:
        result = await self.get("query", query=expression)
        return [float(each["value"][1]) for each in result["result"]]

    async def until(self, expression: str) -> None:
        """Wait until the expression has a value."""
        began = monotonic()
        while monotonic() - began < LIMIT_S:
            try:
                if await self.values(expression):
                    return
            except aiohttp.ClientError:
                pass  # it starts
            await asyncio.sleep(0.2)
        raise AssertionError(f"no value of {expression} within {LIMIT_S:.0f} s")


@asynccontextmanager
async def prometheus(folder: Path, runs: Path) -> AsyncIterator[Prometheus]:
    """Run Prometheus with the project's configuration, scraping every second instead of 15 s."""
    folder.mkdir()
    shutil.copy(INFRA / "alerts.yml", folder)
    text = (INFRA / "prometheus.yml").read_text()
    assert text.count("../../runs/") == 1
    text = text.replace("../../runs/", f"{runs}/").replace("15s", "1s").replace("10s", "1s")
    (folder / "prometheus.yml").write_text(text)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    )
    try:
        async with aiohttp.ClientSession() as session:
            yield Prometheus(port, session)
    finally:
        process.terminate()
        await process.wait()


async def scraped(layout: RunLayout) -> dict[str, float]:
    """Return the run's series without further labels, scraped from the driver."""
    dashboard = json.loads(layout.cluster.read_text())["dashboard"]
    url = urljoin(dashboard, "/metrics")
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        text = await answer.text()
    samples = (sample for each in text_string_to_metric_families(text) for sample in each.samples)
    return {each.name: each.value for each in samples if each.labels == {"run": layout.name}}


def totals(layout: RunLayout, column: str) -> dict[int, float]:
    """Return the sum of a column of the ledger up to each step, without the genesis."""
    steps = areal_flow.open_run(layout.root).steps("polars", columns=["step", column])
    steps = steps.filter(steps["step"] > 0)
    return dict(zip(steps["step"], steps[column].cum_sum(), strict=True))


async def check_totals(layout: RunLayout) -> None:
    """Compare the driver's totals with its ledger, between two steps."""
    for _ in range(50):
        metrics = await scraped(layout)
        step = int(metrics["areal_flow_steps_total"])
        trained, masked = (totals(layout, f"num_{fate}_tokens") for fate in ("trained", "masked"))
        assert metrics["areal_flow_staleness_versions_count"] == trained[step]
        if metrics["areal_flow_trained_tokens_total"] == trained[step]:
            assert metrics["areal_flow_masked_tokens_total"] == masked[step]
            return
        await asyncio.sleep(0.05)  # a step is computed, and its row is not in the ledger yet
    raise AssertionError(f"trained tokens of {metrics} are never those of the ledger: {trained}")


@pytest.mark.slow
@needs_prometheus
def test_prometheus_has_what_alerts_panels_and_the_guide_name_also_after_a_resume(
    tmp_path: Path,
) -> None:
    layout = RunLayout((tmp_path / "runs" / "scraped").resolve())
    target = tmp_path / "runs" / "prometheus" / "scraped.json"
    heads: list[int] = []

    async def train_two_steps() -> None:
        await step_reached(layout, 2)
        assert "127.0.0.1:" in target.read_text()
        await check_totals(layout)
        heads.append(len(areal_flow.open_run(layout.root).steps("arrow")) - 1)

    async def look() -> None:
        async with prometheus(tmp_path / "prometheus", tmp_path / "runs") as server:
            await server.until(f"areal_flow_steps_total > {heads[0]}")
            await server.until("increase(areal_flow_steps_total[1m]) > 0")
            await check_totals(layout)
            names = set(await server.get("label/__name__/values"))
            for title, expressions in panels().items():
                for expression in expressions:
                    query = expression.replace("$run", "scraped")
                    query = query.replace("$__rate_interval", "1m")
                    assert set(SERIES.findall(query)) <= names, title
                    await server.until(query)
            for name, expression in alerts().items():
                assert set(SERIES.findall(expression)) <= names, name
                without_bound = re.sub(r" (==|>|<) [\d.]+$", "", expression)
                assert without_bound != expression
                assert await server.values(without_bound), name
            rules = await server.get("rules")
            health = {rule["name"]: rule["health"] for rule in rules["groups"][0]["rules"]}
            assert health == dict.fromkeys(alerts(), "ok")
            own = {re.sub("_(bucket|sum|count)$", "", n) for n in names if "areal_flow_" in n}
            guide = (ROOT / "docs" / "guides" / "monitoring.md").read_text()
            assert set(re.findall(r"`(areal_flow_\w+)`", guide)) == own

    recipe = small_recipe(num_steps=10_000)
    run_while(layout.root, recipe, train_two_steps)
    assert not target.exists(), "Prometheus forgets a run that has ended"
    resume_while(layout, recipe, look)
