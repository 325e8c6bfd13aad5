"""What the controller records: digests, seeds, token accounting, ledger rows."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

from areal_flow.core.types import (
    Discard,
    GroupReceipt,
    PolicyHashes,
    StepRequest,
    TrajectoryReceipt,
    VersionSpan,
)
from areal_flow.flow.recovery.restore import result_from_row
from areal_flow.log.ledger_row import (
    Provenance,
    StepEntries,
    TokenAccounting,
    batch_digest,
    genesis_row,
    group_seeds,
    member_seed,
    step_row,
)

PROVENANCE = Provenance(3, "config", "code")
GENESIS = genesis_row(
    PolicyHashes("weights", "served"),
    provenance=PROVENANCE,
    numeric_environment='{"device": "cpu"}',
)


def test_digest_names_the_version_and_the_trajectories_in_order() -> None:
    assert batch_digest(0, ()) == "5feceb66ffc86f38d952786c6d696c79"
    assert batch_digest(7, ("a", "b")) == "8c5e9c3eff1a8afc5c835342cc35475b"
    assert batch_digest(7, ("b", "a")) != batch_digest(7, ("a", "b"))
    assert batch_digest(7, ("ab",)) != batch_digest(7, ("a", "b"))


def test_seeds_follow_from_run_submission_and_member_alone() -> None:
    assert group_seeds(0, 0, 2) == (9044811311333822937, 322563471726601473)
    assert group_seeds(7, 12, 3) == tuple(member_seed(7, 12, member) for member in range(3))
    drawn = {member_seed(r, s, m) for r in (0, 1, 11) for s in (0, 1, 11) for m in (0, 1, 11)}
    assert len(drawn) == 27
    assert all(0 <= seed < 2**63 for seed in drawn)


def test_every_committed_token_is_in_one_account() -> None:
    accounting = TokenAccounting()
    accounting.commit(100)
    accounting.commit(50)
    accounting.discard([Discard("a", 7, "stale"), Discard("b", 3, "stale")])
    assert accounting.imbalance(num_waiting=140) == 0
    accounting.begin_step(60)
    assert accounting.imbalance(num_waiting=80) == 0
    accounting.end_step(num_trained=41, num_masked=19)
    assert accounting.imbalance(num_waiting=80) == 0
    assert accounting.imbalance(num_waiting=79) == 1
    accounts = (accounting.committed, accounting.trained, accounting.masked, accounting.discarded)
    assert accounts == (150, 41, 19, 10)
    accounting.begin_step(30)
    accounting.end_step(num_trained=30, num_masked=0)
    assert (accounting.trained, accounting.masked, accounting.in_step) == (71, 19, 0)


def test_entries_are_of_one_row_and_totals_of_the_run() -> None:
    accounting = TokenAccounting()
    accounting.commit(100)
    accounting.commit(1)
    accounting.discard([Discard("a", 7, "stale")])
    closed = accounting.close_entries()
    assert (closed.num_generated_tokens, closed.discards) == (101, [Discard("a", 7, "stale")])
    assert accounting.entries == StepEntries()
    assert (accounting.committed, accounting.discarded) == (101, 7)


def test_row_of_a_step_has_all_that_was_given() -> None:
    request = StepRequest(4, "of the ledger", 3, ("a", "b"), "digest", max_staleness=2)
    entries = StepEntries(
        num_generated_tokens=90,
        discards=[Discard("c", 5, "stale"), Discard("d", 6, "verifier_error")],
        failed_submissions=[8, 9],
        generate_s=1.5,
        num_member_errors=2,
    )
    row = step_row(
        request,
        replace(result_from_row(GENESIS), parent_hash="parent"),
        entries=entries,
        watermark=40,
        next_submission_index=12,
        num_waiting_tokens=33,
        provenance=PROVENANCE,
        wait_s=0.25,
        step_s=2.5,
        num_generators=2,
    )
    expected = {
        "step": 4,
        "policy_version": 3,
        "trajectory_ids": ["a", "b"],
        "batch_digest": "digest",
        "parent_hash": "parent",
        "num_generated_tokens": 90,
        "num_discarded_tokens": 11,
        "discarded": [
            {"trajectory_id": "c", "reason": "stale"},
            {"trajectory_id": "d", "reason": "verifier_error"},
        ],
        "failed_submissions": [8, 9],
        "num_failed_members": 2,
        "generate_s": 1.5,
        "trajectory_watermark": 40,
        "next_submission_index": 12,
        "num_waiting_tokens": 33,
        "writer_epoch": 3,
        "config_hash": "config",
        "code_version": "code",
        "weights_hash": "weights",
        "served_hash": "served",
        "loss": 0.0,
        "masked_fraction_by_decile": [],
        "numeric_environment": '{"device": "cpu"}',
        "wait_s": 0.25,
        "step_s": 2.5,
    }
    assert {name: row[name] for name in expected} == expected
    assert row["metrics"]["speed/generated_tokens_per_s"] == 36
    assert row["metrics"]["speed/generators_busy_fraction"] == 0.3
    assert datetime.now(UTC) - row["committed_at"] < timedelta(minutes=1)


def test_genesis_is_step_zero_neutral() -> None:
    expected = {
        "step": 0,
        "policy_version": 0,
        "parent_hash": "",
        "trajectory_ids": [],
        "batch_digest": batch_digest(0, ()),
        "discarded": [],
        "failed_submissions": [],
        "trajectory_watermark": 0,
        "next_submission_index": 0,
        "writer_epoch": 3,
        "num_trained_tokens": 0,
        "wait_s": 0.0,
        "step_s": 0.0,
    }
    assert {name: GENESIS[name] for name in expected} == expected


def test_scored_members_are_those_with_a_reward() -> None:
    accounting = TokenAccounting()
    members = tuple(
        TrajectoryReceipt(f"t{index}", (VersionSpan(0, 4),), reward, "stop")
        for index, reward in enumerate((1.0, None, 0.0))
    )
    accounting.commit_group(GroupReceipt(0, (), members, member_errors=("it raised",)))
    entries = accounting.close_entries()
    assert (entries.num_scored, entries.num_member_errors) == (2, 1)
    assert entries.num_generated_tokens == 12
