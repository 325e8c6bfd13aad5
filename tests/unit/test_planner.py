"""`areal-flow plan --gpus`: splits, words and numbers; calibration; the paper's rows in small."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from areal_flow.config import Recipe
from areal_flow.core.errors import ConfigError, RunError
from areal_flow.planning.costs import (
    ASSUMED,
    Efficiencies,
    Policy,
    assumed_lengths,
    costs_of,
    model_config,
)
from areal_flow.planning.gpus import GPUS, gpu_named
from areal_flow.planning.memory import RankMemory
from areal_flow.planning.planner import (
    Job,
    calibrate,
    enough_generators,
    fastest_split,
    generator_gpus,
    make_plan,
    simulated_run,
    with_cluster,
)
from areal_flow.policy.models.huggingface import AutoConfig
from benchmarks.paper import HOURS, Setting
from pipelines.cli.main import main
from pipelines.jobs.job import chosen_recipe
from tests.unit.test_memory_plan import SHAPE

REACHED = Efficiencies(
    training=8e-5, decode_step_s=0.02, token_s=0.0, reward_s=0.0, publish_s=2.0, commit_s=1.0
)
LENGTHS = assumed_lengths(2048, prompt_tokens=64.0, group_share=0.0)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return Policy.of(AutoConfig.for_model("qwen2", **SHAPE))


def recipe_of(**sections: Any) -> Recipe:
    given = {
        "controller": {"batch_size": 256},
        "generation": {
            "max_new_tokens": 2048,
            "max_model_len": 2304,
            "max_num_seqs": 64,
            "device": "cuda",
        },
        "sft": {"num_steps": 0},
        "cluster": {"num_generators": 3, "num_trainers": 1, "num_reward_workers": 8},
        "prompts": {"source": "file", "path": "rows.jsonl"},
    }
    for section, values in sections.items():
        given[section] = given.get(section, {}) | values
    given["model"] = "a_model"
    return chosen_recipe("arithmetic", given, spelling="{}")[1]


def job_of(policy: Policy, num_gpus: int = 8, **sections: Any) -> Job:
    return Job(recipe_of(**sections), policy, GPUS["H100-80GB"], num_gpus, LENGTHS)


def test_the_split_is_the_recipes_unless_the_best_one_is_requested(policy: Policy) -> None:
    job = job_of(policy)
    plan = make_plan(job)
    assert (plan.num_generator_gpus, plan.recipe.cluster.num_trainers) == (6, 2)
    best = make_plan(job, best=True)
    assert best.recipe == plan.best
    steps = {generator_gpus(each): job.steady(each).step_s for each in job.splits()}
    assert steps[best.num_generator_gpus] == min(steps.values())


def test_the_fastest_of_many_splits_is_among_the_few_that_are_tried(policy: Policy) -> None:
    job = job_of(policy, 48)
    splits = list(job.splits())
    step_s = job.steady(fastest_split(job, splits)).step_s
    assert step_s == min(job.steady(each).step_s for each in splits)


def test_splits_are_whole_generators_and_whole_rows_of_ranks(policy: Policy) -> None:
    parallel = {"parallel": {"context_ranks": 2}}
    two = {"vllm": {"tensor_parallel_size": 2}}
    job = job_of(policy, trainer=parallel, generation=two, cluster={"num_trainers": 2})
    sizes = [(each.cluster.num_generators, each.cluster.num_trainers) for each in job.splits()]
    assert sizes == [(3, 2), (2, 4), (1, 6)]
    with pytest.raises(ConfigError, match="at least 2 for a generator"):
        make_plan(replace(job, num_gpus=3))


def test_recipe_for_one_gpu_shares_none_when_planned_on_several(policy: Policy) -> None:
    job = job_of(policy, cluster={"num_gpus": 1})
    assert not any(split.cluster.has_one_gpu for split in job.splits())
    (shared,) = replace(job, num_gpus=1).splits()
    assert shared.cluster.has_one_gpu


def test_money_is_hours_of_all_gpus_at_a_price(policy: Policy) -> None:
    plan = make_plan(job_of(policy))
    assert plan.hours == pytest.approx(plan.recipe.num_steps * plan.simulated.step_s / 3600)
    assert plan.cost(3.0) == pytest.approx(plan.hours * 8 * 3)
    assert plan.cost() == pytest.approx(plan.hours * 8 * GPUS["H100-80GB"].price_per_hour)


def test_the_bottleneck_is_named_and_removing_it_helps_most(policy: Policy) -> None:
    plan = make_plan(job_of(policy, cluster={"num_reward_workers": 1}))
    assert "Scoring is the bottleneck" in plan.bottleneck.text
    assert plan.changes["twice the reward workers"] < 0.7
    sync = make_plan(job_of(policy)).job
    sync = replace(sync, recipe=sync.recipe.model_copy(update={"schedule": "sync"}))
    slow = make_plan(sync)
    assert "the longest completion" in slow.bottleneck.text
    assert slow.changes["schedule = async"] < 1


def test_more_bandwidth_decodes_faster_and_more_ranks_train_faster(policy: Policy) -> None:
    recipe, efficiency = recipe_of(), Efficiencies()
    gpus = [GPUS[name] for name in ("A100-80GB", "H200-141GB")]
    slow, fast = (costs_of(recipe, policy, gpu, LENGTHS, efficiency) for gpu in gpus)
    assert fast.cached_token_s / slow.cached_token_s == pytest.approx(2.039 / 4.8)
    ranks = with_cluster(recipe, num_trainers=4)
    shared = costs_of(ranks, policy, gpus[0], LENGTHS, efficiency)
    assert shared.train_pair_s == pytest.approx(slow.train_pair_s / 4)


def test_a_gpu_is_named_by_any_unique_part_of_its_name() -> None:
    assert gpu_named("4090") is GPUS["RTX4090-24GB"]
    assert gpu_named("H200") is GPUS["H200-141GB"]
    with pytest.raises(ConfigError, match="unknown GPU 'A100'"):
        gpu_named("A100")


def test_calibration_recovers_the_efficiency_of_a_run(policy: Policy) -> None:
    made = replace(job_of(policy, controller={"batch_size": 128}), efficiency=REACHED)
    row = ledger_row(made)
    calibrated = calibrate(replace(made, efficiency=ASSUMED), [row] * 12, commit_s=REACHED.commit_s)
    assert calibrated.efficiency.training == pytest.approx(REACHED.training, rel=0.05)
    assert calibrated.efficiency.decode_step_s == pytest.approx(0.02, rel=0.1)
    assert calibrated.efficiency.publish_s == pytest.approx(REACHED.publish_s, rel=0.05)
    assert calibrated.predicted_step_s == pytest.approx(row["step_s"], rel=0.05)
    assert calibrated.predicted_staleness == pytest.approx(row["staleness_mean"], rel=0.1)
    with pytest.raises(RunError, match="expected 8 steady steps"):
        calibrate(made, [row] * 6, commit_s=0.0)


def ledger_row(job: Job) -> dict[str, float]:
    """Return a ledger row with the means of a simulated run."""
    made, costs = simulated_run(job.recipe, job.costs(job.recipe), job.lengths), job.costs
    return {
        "generate_s": made.generators_busy * job.recipe.cluster.num_generators * made.step_s,
        "num_generated_tokens": made.generated_tokens_per_s * made.step_s,
        "read_s": 0.0,
        "train_s": made.train_s,
        "stage_s": 0.0,
        "wait_s": made.step_s - made.train_s - costs(job.recipe).publish_s,
        "step_s": made.step_s,
        "staleness_mean": made.staleness_mean,
    }


def test_work_after_a_step_and_before_the_buffer_makes_tokens_older(policy: Policy) -> None:
    none = {"publish_s": 0.0, "commit_s": 0.0}

    def step(num_generators: int, **seconds: float) -> dict[str, float]:
        job = job_of(policy, cluster={"num_generators": num_generators})
        return ledger_row(replace(job, efficiency=replace(REACHED, **none | seconds)))

    published, without = step(8, publish_s=10.0), step(8)
    assert published["step_s"] == pytest.approx(without["step_s"] + 10, rel=0.1)
    committed, without = step(3, commit_s=10.0), step(3)
    assert committed["step_s"] == pytest.approx(without["step_s"], rel=0.1)
    assert committed["staleness_mean"] > without["staleness_mean"] + 0.1


def test_the_number_of_generators_goes_to_the_plans_and_stays(policy: Policy) -> None:
    """A run is simulated with each number; the plan sees only its ledger."""
    job = replace(job_of(policy, controller={"batch_size": 128}), efficiency=REACHED)

    def with_number(number: int) -> Job:
        return replace(job, recipe=with_cluster(job.recipe, num_generators=number))

    rows = {number: ledger_row(with_number(number)) for number in range(1, 9)}
    steps = {number: row["step_s"] for number, row in rows.items()}
    enough = min(number for number, step_s in steps.items() if step_s < steps[8] / 0.95)
    assert 2 < enough < 7

    def planned(number: int) -> int:
        unknown = replace(with_number(number), efficiency=ASSUMED)
        calibrated = calibrate(unknown, [rows[number]] * 12, commit_s=REACHED.commit_s)
        return enough_generators(replace(unknown, efficiency=calibrated.efficiency), (1, 8))

    first = {start: planned(start) for start in (1, 8)}
    assert {planned(number) for number in first.values()} == {enough}, (first, steps)


@pytest.mark.parametrize("eta", [0, 4])
def test_the_model_has_the_papers_hours(eta: int) -> None:
    """Of sync and async, Table 1: here with a sixteenth of batch and GPUs."""
    hours = 250 * Setting("1.5B", 16, eta=eta, scale=16, seeds=2).step_s(ASSUMED) / 3600
    assert hours == pytest.approx(HOURS[eta, "1.5B"], rel=0.1)


@pytest.mark.parametrize("size", ["1.5B", "7B", "14B", "32B"])
def test_shapes_of_the_distilled_family_are_built_in(size: str) -> None:
    policy = Policy.of(model_config(f"deepseek-ai/DeepSeek-R1-Distill-Qwen-{size}"))
    billions = {"1.5B": 1.78, "7B": 7.62, "14B": 14.8, "32B": 32.8}[size]
    assert policy.num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_command_prints_a_plan_as_one_object(
    capsys: pytest.CaptureFixture[str], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = [RankMemory(0, 2**30, {})]  # what it is has tests of its own, and takes seconds
    monkeypatch.setattr("areal_flow.planning.memory.trainer_memory", lambda *_, **__: memory)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", **SHAPE}))
    settings = ["--controller.batch-size", "64", "--num-steps", "100", "--model", str(tmp_path)]
    command = ["plan", "--gpu", "H800-80GB", "--sft.num-steps", "0", *settings, "--gpus"]
    assert main([*command, "2", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["num_generator_gpus"] == data["num_trainer_gpus"] == 1
    assert data["cost"] == pytest.approx(data["hours"] * 2 * 2.5)
    assert data["memory"]["fits"]
    assert {"step_s", "trained_tokens_per_second", "staleness_mean", "bottleneck"} < data.keys()
    assert main([*command, "1", "--cluster.num-reward-workers", "1000"]) == 0
    output = capsys.readouterr().out
    assert "trainer and generator share one GPU" in output
    assert "The GPU has both sides of a step" in output
    assert "bottleneck" in output
    assert main(["plan", "--price", "2"]) == 2
