"""Costs of a run's devices, against sums by hand, complete to the last second."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import pytest

from areal_flow.core.errors import ConfigError
from areal_flow.flow.costs import CostAccounting, Tenure, Workers, read_workers, record_worker_event
from areal_flow.log.ledger_row import OBSERVED, REWARD_TASKS
from pipelines.costs import parse_prices


def row(step: int, at: float, **columns: Any) -> dict[str, Any]:
    """Return a ledger row of an idle step of ten seconds."""
    names = ("wait", "read", "train", "stage", "generate")
    kinds = ("trained", "masked", "discarded", "waiting")
    return {
        "step": step,
        "writer_epoch": 1,
        "committed_at": datetime.fromtimestamp(at, UTC),
        "step_s": 10.0,
        **{f"{name}_s": 0.0 for name in names},
        **{f"num_{kind}_tokens": 0 for kind in kinds},
        "metrics": {},
        **columns,
    }


def workers(*tenures: Tenure) -> Workers:
    return Workers(
        tenures, False, {tenure.writer_epoch: min(tenure.present[1], 130.0) for tenure in tenures}
    )


def tenure(role: str, rate: float = 1.0, begin: float = 95.0, end: float = 130.0) -> Tenure:
    return Tenure(1, role, rate, (begin, end))


WORKERS = workers(tenure("generator", rate=2.0), tenure("trainer"), tenure("reward"))


def test_work_is_charged_to_tokens_when_they_are_consumed_and_the_rest_is_idle() -> None:
    accounting = CostAccounting()
    step = accounting.add(
        row(
            1,
            110.0,
            generate_s=5.0,
            train_s=4.0,
            num_trained_tokens=60,
            num_masked_tokens=20,
            num_waiting_tokens=20,
            metrics={OBSERVED: 10.0, REWARD_TASKS: 1.0},
        ),
        WORKERS,
    )
    first = step.accounts
    assert (step.token["generator"], step.token["trainer"]) == pytest.approx((0.1, 0.05))
    # Two generators, half of the time: ten device seconds for a hundred tokens.
    of_generator = {
        use: first["generator", use] for use in ("trained", "masked", "waiting", "idle")
    }
    assert of_generator == pytest.approx({"trained": 6, "masked": 2, "waiting": 2, "idle": 10})
    assert (first["trainer", "trained"], first["trainer", "masked"]) == pytest.approx((3, 1))
    assert (first["reward", "trained"], first["reward", "idle"]) == pytest.approx((0.6, 9))
    second = accounting.add(
        row(2, 120.0, num_discarded_tokens=20, metrics={OBSERVED: 10.0}), WORKERS
    )
    assert second.accounts["generator", "discarded"] == pytest.approx(2)
    assert second.accounts["generator", "waiting"] == pytest.approx(-2), "older tokens are gone"
    assert second.accounts["generator", "idle"] == pytest.approx(20)


def test_each_step_and_the_whole_run_add_up_to_the_devices_time() -> None:
    accounting = CostAccounting()
    steps = [
        accounting.add(row(n, 100.0 + 10 * n, num_trained_tokens=n, train_s=99.0), WORKERS)
        for n in (1, 2)
    ]
    assert [sum(step.accounts.values()) for step in steps] == pytest.approx([40, 40])
    total = accounting.whole(WORKERS)
    assert total["generator", "outside"] == pytest.approx(2 * (5 + 10))
    assert sum(total.values()) == pytest.approx(4 * (130 - 95))


def test_time_without_a_process_and_what_a_restored_trainer_repeats_are_lost() -> None:
    broken = tenure("trainer")
    broken.outages.append((102.0, 105.0))
    accounting = CostAccounting().add(
        row(1, 110.0, train_s=2.0, wait_s=1.0, num_trained_tokens=1), workers(broken)
    )
    uses = {use: accounting.accounts["trainer", use] for use in ("trained", "lost", "idle")}
    assert uses == pytest.approx({"trained": 2, "lost": 3 + 4, "idle": 1})


def test_work_after_the_last_row_of_a_killed_driver_is_lost() -> None:
    accounting = CostAccounting()
    killed = tenure("trainer", end=inf)  # it wrote no end: known to live until its last event, 130
    both = workers(killed, replace(tenure("trainer", begin=140.0, end=170.0), writer_epoch=2))
    both = replace(both, latest={1: 130.0, 2: 170.0})
    accounting.add(row(1, 110.0), both)
    accounting.add(row(2, 160.0, writer_epoch=2), both)
    total = accounting.whole(both)
    assert total["trainer", "outside"] == pytest.approx(5 + 10), "first start, last end"
    assert total["trainer", "lost"] == pytest.approx(20 + 10), "after the last row, and the restart"


def test_time_before_the_first_step_counts_although_no_worker_had_an_event_since_it_joined() -> (
    None
):
    killed = replace(workers(tenure("trainer", end=inf)), latest={1: 95.0})
    accounting = CostAccounting()
    accounting.add(row(1, 110.0), killed)
    assert accounting.whole(killed)["trainer", "outside"] == pytest.approx(5)


def test_driver_that_ends_before_its_first_row_costs_its_workers_time() -> None:
    total = CostAccounting().whole(WORKERS)
    assert (total["generator", "outside"], sum(total.values())) == pytest.approx((70, 140))


def test_events_become_tenures_with_outages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "workers.jsonl", iter(range(100))
    monkeypatch.setattr("areal_flow.flow.costs.time", lambda: float(next(clock)))
    note = partial(record_worker_event, path, 3, worker="generator-0", role="generator")
    placed = {"num_devices": 0.5, "is_gpu": True}
    for event in ("joined", "died", "joined", "died"):
        note(event, **placed)
    with path.open("a") as written:
        written.write('{"at": 4.0, "wri\n')
    note("left", **placed)
    note("left", **placed)
    workers = read_workers(path, {})
    (tenure,) = workers.tenures
    assert (tenure.present, tenure.outages) == ((0.0, 4.0), [(1.0, 2.0), (3.0, 4.0)])
    assert workers.held(3, (0.0, 10.0))["generator"] == 0.5 * 4
    assert workers.lost(3, (0.0, 10.0))["generator"] == 0.5 * (1 + 1)
    assert workers.held(2, (0.0, 10.0))["generator"] == 0, "of another driver"
    assert not read_workers(tmp_path / "none", {}).tenures


def test_time_in_the_queue_costs_nothing_and_the_start_after_it_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generator at 2 $ an hour is preempted after an hour and queued for six."""
    hours = iter((0.0, 1.0, 7.0, 7.5, 9.0))
    monkeypatch.setattr("areal_flow.flow.costs.time", lambda: 3600 * next(hours))
    path, worker = tmp_path / "workers.jsonl", {"worker": "generator-0", "role": "generator"}
    for event in ("joined", "queued", "started", "joined", "left"):
        record_worker_event(path, 1, event, num_devices=1, is_gpu=True, **worker)
    workers, interval = read_workers(path, {"gpu": 2.0}), (0.0, 10 * 3600.0)
    assert workers.held(1, interval)["generator"] == pytest.approx(2.0 * 3)
    assert workers.lost(1, interval)["generator"] == pytest.approx(2.0 * 0.5)
    assert workers.held(1, (2 * 3600.0, 3 * 3600.0))["generator"] == 0


def test_outage_ends_when_its_worker_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = iter((0.0, 10.0, 20.0, 20.0))
    monkeypatch.setattr("areal_flow.flow.costs.time", lambda: next(moments))
    path, worker = tmp_path / "workers.jsonl", {"worker": "generator-0", "role": "generator"}
    for event in ("joined", "queued", "left", "started"):
        record_worker_event(path, 1, event, num_devices=1, is_gpu=True, **worker)
    workers = read_workers(path, {})
    interval = (0.0, 100.0)
    assert workers.held(1, interval)["generator"] == 10
    assert workers.lost(1, interval)["generator"] == 0


def test_a_price_is_of_the_role_or_the_device_and_without_prices_costs_are_seconds(
    tmp_path: Path,
) -> None:
    path = tmp_path / "workers.jsonl"
    for role in ("generator", "trainer", "reward"):
        worker = {"worker": role, "role": role, "num_devices": 2, "is_gpu": role != "reward"}
        record_worker_event(path, 1, "joined", **worker)

    def rates_of(**prices: float) -> dict[str, float]:
        return {worker.role: worker.rate for worker in read_workers(path, prices).tenures}

    assert rates_of(gpu=3600.0, trainer=7200.0) == {"generator": 2.0, "trainer": 4.0, "reward": 0.0}
    assert rates_of() == {"generator": 2.0, "trainer": 2.0, "reward": 2.0}
    assert read_workers(path, {"cpu": 1.0}).has_prices
    assert not read_workers(path, {"cpu": 0.0}).has_prices


def test_prices_are_parsed_and_a_wrong_one_is_named() -> None:
    assert parse_prices(["2.5", "cpu=0.05", "trainer=H100-80GB"]) == {
        "gpu": 2.5,
        "cpu": 0.05,
        "trainer": 2.5,
    }
    for wrong in ("-1", "inf", "abc", "tpu=1", "gpu=nan"):
        with pytest.raises(ConfigError, match=f"--price {wrong}"):
            parse_prices([wrong])
