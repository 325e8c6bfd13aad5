"""Strong scaling in virtual time: the planner's model of the paper's job to 1,024 GPUs.

1.5B parameters on H800 GPUs, batches of 8,192, staleness of at most 8, contexts of 16,384 and
32,768 tokens with 1,024 of them for the prompt, three of four GPUs for generation as in the paper
(arXiv 2505.24298, section 7.1). Lengths are lognormal with one median, cut at each context.
`over_ideal` is throughput over that of the fewest GPUs times the ratio of GPUs. `bound_by` is the
larger of both sides of a step, or `waits` if neither fills it.

    python -m benchmarks.scaling [--gpus 32 64 128 256 512 1024] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import process_time
from typing import Any

from areal_flow.planning.costs import assumed_lengths
from areal_flow.planning.planner import Job, simulated_run
from benchmarks import harness
from benchmarks.paper import Setting

CONTEXTS = {16_384: 0.506, 32_768: 0.3006}
"""The mean of completions, over the longest: of a median of 6,522, that of the paper's mean."""
PROMPT_ROOM = 1024
NEARLY = 0.93
"""Of a step: a side that takes more of it bounds it."""


def measure(context: int, num_gpus: int, schedule: str) -> dict[str, Any]:
    job = job_of(context, num_gpus, schedule)
    began, costs = process_time(), job.costs(job.recipe)
    simulated = simulated_run(job.recipe, costs, job.lengths)
    steady = job.steady(job.recipe)
    sides = {"generation": steady.generate_s, "training": steady.train_s}
    largest = max(sides, key=sides.__getitem__)
    is_full = max(simulated.generators_busy, simulated.trainer_busy) > NEARLY
    return {
        "context": context,
        "gpus": num_gpus,
        "schedule": schedule,
        "step_s": simulated.step_s,
        "rows_a_generator": steady.num_rows,
        "generators_busy": simulated.generators_busy,
        "trainer_busy": simulated.trainer_busy,
        "bound_by": largest if is_full else "waits",
        "staleness": simulated.staleness_mean,
        "masked_fraction": simulated.masked_fraction,
        "k_tokens_per_s": simulated.trained_tokens_per_s / 1e3,
        "seconds_to_simulate": process_time() - began,
    }


def job_of(context: int, num_gpus: int, schedule: str) -> Job:
    setting = Setting("1.5B", num_gpus // 8, eta=8 if schedule == "async" else 0)
    longest = context - PROMPT_ROOM
    recipe, job = setting.recipe(), setting.job()
    changed = {"max_new_tokens": longest, "max_model_len": context}
    generation = recipe.generation.model_copy(update=changed)
    trainer = recipe.trainer.model_copy(update={"tokens_per_micro_batch": 32_768})
    recipe = recipe.model_copy(update={"generation": generation, "trainer": trainer})
    lengths = assumed_lengths(longest, mean=CONTEXTS[context] * longest)
    return Job(recipe, job.policy, job.gpu, num_gpus, lengths, job.efficiency)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for place, context in zip(figure.subplots(1, len(CONTEXTS)), CONTEXTS, strict=True):
        for schedule, mark in (("async", "o-"), ("sync", "s-")):
            selected = [r for r in rows if (r["context"], r["schedule"]) == (context, schedule)]
            gpus = [row["gpus"] for row in selected]
            place.loglog(gpus, [row["k_tokens_per_s"] for row in selected], mark, label=schedule)
            if schedule == "async":
                first = selected[0]["k_tokens_per_s"] / gpus[0]
                place.loglog(gpus, [first * each for each in gpus], "k--", lw=1, label="linear")
        place.set_xticks(gpus, [f"{each:,}" for each in gpus])
        place.minorticks_off()
        place.set(title=f"{context:,} tokens", xlabel="GPUs", ylabel="thousand trained tokens/s")
        place.legend()
    figure.savefig(path)


def main() -> None:
    gpus = [32, 64, 128, 256, 512, 1024]
    chosen = harness.parse_options(__doc__, gpus=gpus, plot=Path)
    rows = [
        measure(context, number, schedule)
        for context in CONTEXTS
        for schedule in ("async", "sync")
        for number in chosen.gpus
    ]
    for row in rows:
        few = next(r for r in rows if all(r[k] == row[k] for k in ("context", "schedule")))
        speed = row["k_tokens_per_s"] / few["k_tokens_per_s"]
        row["over_ideal"] = speed / (row["gpus"] / few["gpus"])
    harness.report(chosen.json, {"A step in virtual time": rows})
    if chosen.plot:
        draw(rows, chosen.plot)


if __name__ == "__main__":
    main()
