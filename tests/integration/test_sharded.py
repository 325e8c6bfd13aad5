"""Ranks that share a policy, as processes: they compute what a single process computes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from areal_flow.core.layout import RunLayout
from areal_flow.flow.recovery.replay import replay_step
from areal_flow.policy.checkpoints import checkpoint_path
from areal_flow.policy.models.hashing import hash_files, hash_tensors
from areal_flow.policy.models.policy import load_policy, policy_tensors
from areal_flow.policy.models.reward_model import describe_reward_model
from areal_flow.training.backend import TrainerBackend
from areal_flow.training.checkpoint import read_checkpoint
from areal_flow.training.replicas import ReplicaGroup
from areal_flow.training.settings import SftObjectiveName
from tests import struck_trainer
from tests.integration.runs import (
    check_accounting,
    run_small,
    run_while,
    small_recipe,
    step_reached,
)
from tests.integration.test_elasticity import Observed, check_generation_went_on
from tests.policies import small_policy, write_model_directory
from tests.sharded_ranks import (
    SHARED_TOKENS,
    SUPERVISED,
    TRAININGS,
    TWO_COPIES,
    Training,
    fine_tuned,
    pretrained,
    run_ranks,
    take_step,
    train,
)

pytestmark = pytest.mark.slow
TOLERANCE = {"float32": 5e-5, "bfloat16": 2e-2}
"""Of weights after all steps, absolutely: rates of 1e-3 move a weight by a hundredth at most."""

RankResults = list[dict[str, Any]]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[RankResults, Path]:
    directory = tmp_path_factory.mktemp("ranks")
    write_models(directory)
    cases = [*TRAININGS, *SUPERVISED, "pretrained", "staged", "written", "not finite", "muon"]
    return run_ranks(directory, 2, *cases, "gone", "left"), directory


def write_models(directory: Path) -> None:
    """Write a policy, a reward model's description and what steps of fine-tuning begin with."""
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text("{}")
    write_model_directory(RunLayout(directory / "pretrained").model)
    write_model_directory(directory / "scores")
    describe_reward_model(directory / "scores", pad_token_id=0)
    for objective in SUPERVISED:
        for alone in (True, False):
            model = RunLayout(directory / f"{objective}-{alone}").model
            model.mkdir(parents=True)
            (model / "config.json").write_text("{}")


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[RankResults, Path]:
    directory = tmp_path_factory.mktemp("ranks")
    (directory / "model").mkdir()
    (directory / "model" / "config.json").write_text("{}")
    cases = [*SHARED_TOKENS, *TWO_COPIES, "written", "muon", "behind", "timeouts"]
    return run_ranks(directory, 4, *cases, "left within a sequence"), directory


@pytest.mark.parametrize("name", TRAININGS)
def test_ranks_make_what_one_process_makes(two_ranks: tuple[RankResults, Path], name: str) -> None:
    check_equal([rank[name] for rank in two_ranks[0]], TRAININGS[name])


@pytest.mark.parametrize("name", [*SHARED_TOKENS, *TWO_COPIES])
def test_four_ranks_make_what_one_process_makes(
    four_ranks: tuple[RankResults, Path], name: str
) -> None:
    """In pairs they share tokens, one key-value head, or a copy of the policy."""
    check_equal([rank[name] for rank in four_ranks[0]], (SHARED_TOKENS | TWO_COPIES)[name])


def test_ranks_of_two_copies_write_each_row_once_for_any_number_of_ranks(
    four_ranks: tuple[RankResults, Path],
) -> None:
    ranks, directory = four_ranks
    written = ranks[0]["written"]
    for name, (num_rows, *_) in written["rows"].items():
        parts = [rank["written"]["rows"][name][1:] for rank in ranks]
        rows = [row for first, num in parts for row in range(first, first + num)]
        assert sorted(rows) == [*range(num_rows)], name
    for rank in ranks:
        assert rank["written"]["loaded"] == written["expected"]
        assert rank["written"]["again"] == rank["written"]["after"]
    check_read_by_others(directory, expected=written["expected"], num_ranks=2)


def check_equal(ranks: RankResults, training: Training) -> None:
    expected = train(training, num_ranks=len(ranks))
    tolerance = TOLERANCE[training.settings.dtype]
    for rank in ranks:
        for numbers in ("losses", "grad_norms"):
            assert rank[numbers] == pytest.approx(expected[numbers], rel=tolerance, abs=tolerance)
        # Of the last step, the greatest weight among them.
        assert rank["metrics"] == pytest.approx(
            expected["metrics"], rel=10 * tolerance, abs=tolerance
        )
        assert rank["weights"].keys() == expected["weights"].keys()
        for tensor, values in expected["weights"].items():
            difference = torch.tensor(rank["weights"][tensor]) - torch.tensor(values)
            assert float(difference.abs().max()) < tolerance
        assert rank == ranks[0], "all ranks know the same"


@pytest.mark.parametrize("objective", SUPERVISED)
def test_ranks_fine_tune_as_one_process_does(
    two_ranks: tuple[RankResults, Path], objective: SftObjectiveName
) -> None:
    ranks, directory = two_ranks
    expected = fine_tuned(objective, None, directory)
    for rank in ranks:
        result = rank[objective]
        assert result == ranks[0][objective]
        assert result["resumed"] == result["straight"], "from ranks to ranks to the bit"
        for here, there in zip(result["metrics"], expected["metrics"], strict=True):
            assert here == pytest.approx(there, rel=1e-3, abs=1e-5)


def test_ranks_read_their_rows_of_a_directory_and_draw_the_same_adapter(
    two_ranks: tuple[RankResults, Path],
) -> None:
    ranks, directory = two_ranks
    expected = pretrained(None, directory)
    for rank in ranks:
        for name, (weights_hash, served_hash, logprobs) in expected.items():
            assert rank["pretrained"][name][:2] == [weights_hash, served_hash]
            torch.testing.assert_close(
                torch.tensor(rank["pretrained"][name][2]), torch.tensor(logprobs)
            )


def test_weights_leave_ranks_as_those_of_a_whole_policy(
    two_ranks: tuple[RankResults, Path],
) -> None:
    for index, rank in enumerate(two_ranks[0]):
        assert rank["staged"]["sharded"] == rank["staged"]["whole"]
        assert bool(rank["staged"]["num_hashed"]) == (index == 0), "the leader alone hashes"


def test_checkpoint_that_ranks_wrote_is_one_that_anybody_continues_from(
    two_ranks: tuple[RankResults, Path], tmp_path: Path
) -> None:
    """The same ranks, three other ranks, and a single process."""
    ranks, directory = two_ranks
    for rank in ranks:
        written = rank["written"]
        assert written["loaded"] == written["expected"]
        assert written["again"] == written["after"]
    check_read_by_others(directory, expected=ranks[0]["written"]["expected"], num_ranks=3)


def test_muon_moves_rows_of_two_copies_as_it_moves_whole_matrices(
    four_ranks: tuple[RankResults, Path],
) -> None:
    test_muon_moves_rows_as_it_moves_whole_matrices(four_ranks)


def test_rank_that_others_wait_for_has_begun_fewer_exchanges(
    four_ranks: tuple[RankResults, Path],
) -> None:
    """The rank waits until it sees this; otherwise the step would not have ended."""
    behind = [rank["behind"] for rank in four_ranks[0]]
    assert behind[0]["losses"]
    assert all(each == behind[0] for each in behind)


def test_groups_of_some_ranks_wait_as_long_as_the_group_of_all(
    four_ranks: tuple[RankResults, Path],
) -> None:
    assert all(rank["timeouts"] == {"seconds": [600.0, 600.0]} for rank in four_ranks[0])


def check_read_by_others(directory: Path, *, expected: str, num_ranks: int) -> None:
    """By ranks that share one copy, and by a single process."""
    path = directory / "checkpoints" / "00000001"
    assert hash_files(path / "model.safetensors") == expected
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    backend = TrainerBackend(small_policy(seed=5), TRAININGS["plain"].settings, ReplicaGroup(2))
    assert read_checkpoint(path, backend).next_submission_index == 7
    assert backend.fingerprint() == expected
    take_step(backend, 2, TRAININGS["plain"])
    for rank in run_ranks(directory, num_ranks, "read"):
        assert rank["read"]["loaded"] == expected


def test_update_that_is_no_number_anywhere_is_skipped_everywhere(
    two_ranks: tuple[RankResults, Path],
) -> None:
    for rank in two_ranks[0]:
        assert rank["not finite"] == {"losses": [], "unchanged": True}


def test_muon_moves_rows_as_it_moves_whole_matrices(
    two_ranks: tuple[RankResults, Path],
) -> None:
    for rank in two_ranks[0]:
        assert all(rank["muon"]["equal"])


def test_rank_that_ends_within_a_pass_is_noticed(two_ranks: tuple[RankResults, Path]) -> None:
    check_noticed([rank["left"]["noticed"] for rank in two_ranks[0]])


def test_rank_that_ends_within_a_sequence_is_noticed(
    four_ranks: tuple[RankResults, Path],
) -> None:
    check_noticed([rank["left within a sequence"]["noticed"] for rank in four_ranks[0]])


def test_rank_that_left_before_is_noticed(two_ranks: tuple[RankResults, Path]) -> None:
    leader, follower = (rank["gone"]["noticed"] for rank in two_ranks[0])
    assert "another trainer rank left" in leader
    assert "left its replica group" in follower


def check_noticed(by_rank: list[str]) -> None:
    leader, *others = by_rank
    assert "another trainer rank left" in leader
    assert {*others} == {"its own end"}


def test_run_whose_ranks_share_tokens_is_audited_and_replayed_within_tolerance(
    tmp_path: Path,
) -> None:
    recipe = small_recipe(
        num_steps=3,
        prompts={"num_held_out": 0},
        trainer={"parallel": {"context_ranks": 2}},
        cluster={"num_generators": 1, "num_trainers": 2},
    )
    layout = run_small(tmp_path / "c", recipe)
    check_accounting(layout)
    replay = replay_step(layout, step=3, from_checkpoint=0)
    assert all(c.tolerance and c.within_tolerance for c in (*replay.before, replay.compared))


@pytest.mark.timeout(600)
def test_run_of_two_copies_survives_ranks_that_are_lost_hang_or_fail_but_waits_for_slow_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replayed too, and its checkpoints can be audited and loaded like any others."""
    layout = RunLayout((tmp_path / "runs" / "s").resolve())
    observed, strikes = Observed(layout), tmp_path / "strikes"
    struck_trainer.prepare(strikes, monkeypatch)

    async def processes() -> list[int]:
        return [await observed.process(f"trainer-{rank}") for rank in range(4)]

    async def strike_them() -> None:
        await step_reached(layout, 2)
        before = await processes()
        struck_trainer.strike(strikes, before[2], "slow")
        await step_reached(layout, observed.head() + 2)
        assert await processes() == before
        os.kill(before[3], signal.SIGKILL)
        await observed.process("trainer-3", other_than=before[3])
        await step_reached(layout, observed.head() + 1)
        stopped, committed = await observed.process("trainer-1"), observed.num_committed()
        os.kill(stopped, signal.SIGSTOP)
        await observed.process("trainer-1", other_than=stopped)
        check_generation_went_on(committed, observed.num_committed(), head=observed.head())
        await step_reached(layout, observed.head() + 1)
        hung = await observed.process("trainer-2")
        struck_trainer.strike(strikes, hung, "hang")
        await observed.process("trainer-2", other_than=hung)
        await step_reached(layout, observed.head() + 1)
        failing = await observed.process("trainer-0")
        struck_trainer.strike(strikes, failing, "gpu")
        await observed.process("trainer-0", other_than=failing)
        await step_reached(layout, observed.head() + 1)

    recipe = small_recipe(
        num_steps=10_000,
        prompts={"num_held_out": 0},
        trainer={
            "checkpoint_every_steps": 2,
            "tokens_per_micro_batch": 256,
            "parallel": {"shard_ranks": 2},
        },
        cluster={"num_generators": 1, "num_trainers": 4, "heartbeat_timeout_s": 3.0},
    )
    run_while(layout.root, recipe, strike_them)
    check_accounting(layout)
    assert not layout.forks.exists(), "ranks that replayed the log made the same bits"
    head = observed.head()
    replay = replay_step(layout, step=head, from_checkpoint=0)
    steps = [*replay.before, replay.compared]
    assert len(steps) == head
    assert all(compared.tolerance > 0 for compared in steps)
    assert all(compared.within_tolerance for compared in steps)
    assert not replay.refused
    written = load_policy(checkpoint_path(layout.checkpoints, head))
    assert hash_tensors(policy_tensors(written)) == replay.recorded.hashes.weights_hash
