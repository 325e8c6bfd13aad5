"""Restoring and replaying over a fake trainer: which checkpoint, which steps, what is compared."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_flow.config import Recipe
from areal_flow.core.errors import TrainerLost, TrainingError
from areal_flow.core.layout import RunLayout
from areal_flow.core.types import NOTHING_TRAINED, PolicyHashes, StepRequest, StepResult
from areal_flow.flow.recovery import restore
from areal_flow.flow.recovery.restore import LedgerReplay, restore_newest
from areal_flow.log.ledger_row import Provenance, StepEntries, genesis_row, step_row

CPU = '{"device": "cpu"}'
PROVENANCE = Provenance(1, "config", "code")


def hashes(weights: str) -> PolicyHashes:
    named = {field.name: f"{field.name} of {weights}" for field in fields(PolicyHashes)}
    return PolicyHashes(**{**named, "weights_hash": weights})


class FakeTrainer:
    """A trainer whose weights are named by all the steps that made them."""

    def __init__(self, unreadable: tuple[int, ...] = (), lost: bool = False) -> None:
        self.unreadable = unreadable
        self.lost = lost
        self.held = ""
        self.requests: list[StepRequest] = []

    async def restore(self, checkpoint: int) -> PolicyHashes:
        if self.lost:
            raise TrainerLost("gone")
        if checkpoint in self.unreadable:
            raise TrainingError(f"checkpoint {checkpoint} cannot be read")
        self.held = "w" + "+".join(map(str, range(checkpoint + 1)))
        return hashes(self.held)

    async def step(self, request: StepRequest) -> StepResult:
        assert request.parent_hash == self.held
        self.requests.append(request)
        self.held = f"{self.held}+{request.step}"
        made = hashes(self.held)
        return StepResult(request.step, made, NOTHING_TRAINED, CPU, request.parent_hash)


class Rows:
    """A ledger of four steps as the fake trainer would have made it."""

    head = 4

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = [
            genesis_row(hashes("w0"), provenance=PROVENANCE, numeric_environment=CPU)
        ]
        for step in range(1, 5):
            parent = self.all[-1]["weights_hash"]
            request = StepRequest(step, parent, step - 1, (f"t{step}",), f"digest {step}", 2)
            made = hashes(f"{parent}+{step}")
            result = StepResult(step, made, NOTHING_TRAINED, CPU, parent)
            self.all.append(
                step_row(
                    request,
                    result,
                    entries=StepEntries(),
                    watermark=0,
                    next_submission_index=0,
                    num_waiting_tokens=0,
                    provenance=PROVENANCE,
                    wait_s=0.0,
                    step_s=0.0,
                    num_generators=2,
                )
            )

    def rows(self, columns: list[str] | None = None, *, since: int = 0) -> list[dict[str, Any]]:
        return self.all[since:]

    def row(self, step: int, columns: list[str]) -> dict[str, Any]:
        return {name: self.all[step][name] for name in columns}

    def checkpoints(self, *steps: int) -> dict[int, str]:
        return {step: self.all[step]["weights_hash"] for step in steps}


async def restored(
    trainer: FakeTrainer,
    ledger: Rows,
    *checkpoints: int,
    at_most: int = 4,
    damaged: list[int] | None = None,
) -> LedgerReplay | None:
    return await restore_newest(
        trainer,
        ledger,
        ledger.checkpoints(*checkpoints),
        forks={},
        at_most=at_most,
        max_staleness=2,
        on_damaged=lambda step, _: damaged.append(step) if damaged is not None else None,
    )


async def test_rows_after_the_newest_checkpoint_are_trained_again_in_order() -> None:
    trainer, ledger = FakeTrainer(), Rows()
    replay = await restored(trainer, ledger, 0, 2)
    assert replay is not None
    assert replay.checkpoint == replay.step == 2
    compared = [await replay.advance() for _ in range(2)]
    assert [(c.step, c.equal, c.after_fork) for c in compared] == [
        (3, True, False),
        (4, True, False),
    ]
    assert [request.trajectory_ids for request in trainer.requests] == [("t3",), ("t4",)]
    assert [request.max_staleness for request in trainer.requests] == [2, 2]
    assert replay.hashes.weights_hash == ledger.all[4]["weights_hash"]


@pytest.mark.parametrize(
    ("checkpoints", "chosen"),
    [
        ({0: "w0", 3: "w0+1+2+3", 4: "other", 9: "w9"}, 3),
        ({2: "w0+1+2", 0: "w0", 1: "w0+1"}, 2),
        ({3: "w0+1+2", 2: "w0+1", 0: "w0"}, 0),
        ({4: "w0+1+2+3"}, None),
        ({}, None),
    ],
)
async def test_newest_checkpoint_whose_weights_are_its_rows_is_chosen(
    checkpoints: dict[int, str], chosen: int | None
) -> None:
    replay = await restore_newest(
        FakeTrainer(),
        Rows(),
        checkpoints,
        forks={},
        at_most=4,
        max_staleness=2,
        on_damaged=pytest.fail,
    )
    assert (replay and replay.checkpoint) == chosen


async def test_checkpoint_of_a_recorded_fork_is_restored_and_its_next_row_compared() -> None:
    trainer, ledger = FakeTrainer(), Rows()
    ledger.all[2] |= {"weights_hash": "lost with the trainer", "served_hash": "served"}
    replay = await restore_newest(
        trainer,
        ledger,
        {0: "w0", 2: "w0+1+2"},
        forks={2: [hashes("an earlier fork"), hashes("w0+1+2")]},
        at_most=4,
        max_staleness=2,
        on_damaged=pytest.fail,
    )
    assert replay is not None
    assert (replay.checkpoint, replay.hashes) == (2, hashes("w0+1+2"))
    compared = await replay.advance()
    assert (compared.equal, compared.after_fork) == (True, False)


async def test_checkpoint_beyond_the_requested_step_is_not_used() -> None:
    replay = await restored(FakeTrainer(), Rows(), 0, 2, 4, at_most=3)
    assert replay is not None
    assert replay.checkpoint == 2


async def test_unreadable_checkpoints_are_reported_and_an_older_one_is_used() -> None:
    damaged: list[int] = []
    replay = await restored(FakeTrainer(unreadable=(4, 2)), Rows(), 0, 2, 4, damaged=damaged)
    assert replay is not None
    assert (replay.checkpoint, damaged) == (0, [4, 2])
    assert await restored(FakeTrainer(unreadable=(0,)), Rows(), 0) is None


async def test_checkpoint_that_is_not_its_rows_is_passed_over_and_not_damaged() -> None:
    ledger, damaged = Rows(), []  # type: ignore[var-annotated]
    ledger.all[2]["served_hash"] = "another"
    replay = await restored(FakeTrainer(), ledger, 0, 2, damaged=damaged)
    assert replay is not None
    assert (replay.checkpoint, damaged) == (0, [])


async def test_lost_trainer_is_not_a_damaged_checkpoint() -> None:
    damaged: list[int] = []
    with pytest.raises(TrainerLost):
        await restored(FakeTrainer(lost=True), Rows(), 0, damaged=damaged)
    assert damaged == []


async def test_first_difference_is_refused_and_what_follows_it_is_after_a_fork() -> None:
    ledger = Rows()
    ledger.all[2]["served_hash"] = "another"
    replay = await restored(FakeTrainer(), ledger, 0)
    assert replay is not None
    compared = [await replay.advance() for _ in range(4)]
    assert [c.refused for c in compared] == [False, True, False, False]
    assert [c.after_fork for c in compared] == [False, False, True, True]


async def test_step_that_was_recorded_on_a_fork_is_compared_as_one() -> None:
    ledger = Rows()
    ledger.all[3] |= {"parent_hash": "made elsewhere", "weights_hash": "made elsewhere+3"}
    replay = await restored(FakeTrainer(), ledger, 0)
    assert replay is not None
    compared = [await replay.advance() for _ in range(4)]
    assert [c.after_fork for c in compared] == [False, False, True, True]
    assert not any(c.refused for c in compared)


async def test_metric_that_differs_is_refused_and_is_no_fork() -> None:
    ledger = Rows()
    ledger.all[1]["loss"] = 0.5
    replay = await restored(FakeTrainer(), ledger, 0)
    assert replay is not None
    first, second = [await replay.advance() for _ in range(2)]
    assert (first.refused, first.forked) == (True, False)
    assert (second.equal, second.after_fork) == (True, False)
    assert replace(first, after_fork=True).differences["loss"] == (0.5, NOTHING_TRAINED.loss)


async def test_restored_policy_is_that_of_the_ledgers_head_and_is_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Rows()
    monkeypatch.setattr(restore, "checkpoint_hashes", lambda root: ledger.checkpoints(1))
    published, progress = list[int](), list[tuple[int, int]]()
    channel: Any = SimpleNamespace(publish=published.append)
    held, num_replayed = await restore.restore_policy(
        FakeTrainer(),
        RunLayout(tmp_path),
        Recipe(),
        ledger,  # type: ignore[arg-type]
        channel,
        on_replayed=lambda *counts: progress.append(counts),
    )
    assert (held.weights_hash, num_replayed) == (ledger.all[4]["weights_hash"], 3)
    assert (published, progress) == ([4], [(1, 3), (2, 3), (3, 3)])
