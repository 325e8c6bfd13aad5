"""Fills one sink from a run directory, from the last step that the sink has.

Everything delivered is in the run: ledger rows, evaluations with sample answers, checkpoints, the
recipe. A sink that was unreachable, or is new, is filled in the same way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from areal_flow.config import load_recipe
from areal_flow.core.failures import first_line
from areal_flow.core.layout import RunLayout
from areal_flow.core.pass_rates import PASS_RATE, EvaluationTable, passes, tabulate
from areal_flow.flow.costs import COLUMNS as COST_COLUMNS
from areal_flow.flow.costs import CostAccounting, Workers, by_use, read_workers
from areal_flow.log.dataset import open_dataset
from areal_flow.log.inputs import read_inputs
from areal_flow.log.ledger import STEPS, LedgerReader, LedgerTail
from areal_flow.log.queries import Run
from areal_flow.policy.checkpoints import (
    checkpoint_hashes,
    checkpoint_path,
    is_recorded,
    list_checkpoints,
)
from areal_flow.tracking.protocol import (
    BATCH_PASS_RATE_TAG,
    PASS_RATE_TAG,
    TRAINED_AT_TAG,
    StepMetrics,
    Tracker,
    describe_run,
)
from areal_flow.training.supervised import read_metrics

logger = logging.getLogger(__name__)

METRICS = {
    "train/loss": "loss",
    "train/grad_norm": "grad_norm",
    "train/learning_rate": "learning_rate",
    "train/trained_tokens": "num_trained_tokens",
    "train/masked_tokens": "num_masked_tokens",
    "train/step_s": "step_s",
    "train/compute_s": "train_s",
    "train/wait_s": "wait_s",
    "staleness/mean_versions": "staleness_mean",
    "staleness/max_versions": "staleness_max",
    "rollout/reward_mean": "reward_mean",
    "rollout/completion_mean_tokens": "completion_tokens_mean",
    "rollout/generated_tokens": "num_generated_tokens",
    "rollout/discarded_tokens": "num_discarded_tokens",
    "rollout/waiting_tokens": "num_waiting_tokens",
    "rollout/generate_s": "generate_s",
    "rollout/failed_members": "num_failed_members",
}
"""The ledger's fixed columns by the names that sinks show."""

MAX_EXAMPLE_VERSIONS, MAX_EXAMPLE_PROMPTS = 10, 8
MAX_FINE_TUNING_POINTS = 200
"""A longer run of fine-tuning shows that many steps, evenly spaced, and the last."""

STEP_COLUMNS = [
    name for name in STEPS.names if name in {*METRICS.values(), "metrics", *COST_COLUMNS}
]
_CHECKPOINT_COLUMNS = ["weights_hash", "trajectory_watermark"]
"""What tags of checkpoints need besides."""
_SCORE_COLUMNS = [
    *("held_out", "prompt_id", "sample", "reward", "num_output_tokens", "difficulty"),
    "reward_detail",
]
_EXAMPLE_COLUMNS = ["policy_version", "difficulty", "prompt", "answer", "completion", "reward"]


def step_metrics(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a ledger row's numbers as sinks show them, `train/NAME` where it has no area."""
    fixed = {name: row.get(column) for name, column in METRICS.items()}
    entries = dict(row.get("metrics") or ())
    named = {name if "/" in name else f"train/{name}": value for name, value in entries.items()}
    return {k: float(value) for k, value in {**fixed, **named}.items() if value is not None}


def held_out_metrics(table: EvaluationTable) -> dict[str, float]:
    """Return an evaluation's numbers as `held_out/NAME`, of several sets `held_out/SET/NAME`."""
    sets = {f"held_out/{name}": scores for name, scores in table.several_sets.items()}
    named = {"held_out": table.overall, **sets}
    return {
        f"{area}/{label}": value
        for area, scores in named.items()
        for label, value in scores.by_name().items()
    }


class Projection:
    """Delivers to one sink what it lacks of a run; reads each ledger row once."""

    def __init__(self, layout: RunLayout, sink: Tracker) -> None:
        self._layout = layout
        self._sink = sink
        self._delivered: int | None = None
        self._ledger = LedgerTail(layout, [*STEP_COLUMNS, *_CHECKPOINT_COLUMNS], since=0)
        self._costs = CostAccounting()
        self._pending: list[StepMetrics] = []
        """Of rows that were read and not delivered yet."""
        self._evaluations_version = 0
        self._tags: dict[int, dict[str, str]] = {}
        """Of the steps that have a checkpoint, or may get one, as the ledger has them."""
        self._num_answers: dict[tuple[str, int], int] = {}
        """Of the evaluations that were delivered, by name and version."""
        self._pass_rates: dict[int, float] = {}
        self._checkpoints: Any = None

    def deliver(self) -> int:
        """Deliver whatever is committed and not in the sink yet; return how many steps that was."""
        if self._delivered is None:
            delivered = self._sink.begin()
            self._attempt(
                "what the run is", lambda: self._sink.describe(describe_run(self._layout))
            )
            # The sink can be ahead of a ledger that lost its last rows with the machine's power.
            self._delivered = max(0, min(delivered, LedgerReader(self._layout).head))
        num_steps = self._deliver_steps()
        self._deliver_evaluations()
        self._deliver_checkpoints()
        return num_steps

    def _attempt(self, what: str, deliver: Callable[..., None], *things: Any, **at: int) -> None:
        """Deliver one thing; a refused one does not block the later ones."""
        try:
            deliver(*things, **at)
        except Exception as error:
            if not self._sink.is_reachable():
                raise
            logger.warning("the tracker refused %s, which is left out: %s", what, first_line(error))

    def _deliver_steps(self) -> int:
        """Deliver steps in order; one whose sink is unreachable stays pending."""
        assert self._delivered is not None
        before = self._delivered
        self._deliver_pending()
        for rows in self._ledger.batches():
            self._take_in(rows)
            self._deliver_pending()
        return self._delivered - before

    def _deliver_pending(self) -> None:
        assert self._delivered is not None
        if new := [each for each in self._pending if each.step > self._delivered]:
            self._log_steps(new)
            self._delivered = new[-1].step
        self._pending.clear()

    def _log_steps(self, steps: list[StepMetrics]) -> None:
        """Log steps together; each alone if the sink refuses them."""
        if len(steps) == 1:
            self._attempt(f"step {steps[0].step}", self._sink.log_steps, steps)
            return
        try:
            self._sink.log_steps(steps)
        except Exception:
            if not self._sink.is_reachable():
                raise
            for each in steps:
                self._log_steps([each])

    def _take_in(self, rows: Sequence[dict[str, Any]]) -> None:
        prices = load_recipe(self._layout.config).cluster.prices
        workers = read_workers(self._layout.workers, prices)
        self._pending.extend(self._metrics_of(row, workers) for row in rows)
        self._tags |= {row["step"]: self._checkpoint_tags(row) for row in rows}
        present = list_checkpoints(self._layout.checkpoints)
        newest = max(present, default=-1)  # checkpoints are written in the order of their steps
        self._tags = {
            step: tags for step, tags in self._tags.items() if step > newest or step in present
        }

    def _metrics_of(self, row: Mapping[str, Any], workers: Workers) -> StepMetrics:
        metrics = step_metrics(row) | self._cost_metrics(row, workers)
        return StepMetrics(row["step"], metrics, _milliseconds(row["committed_at"]))

    def _cost_metrics(self, row: Mapping[str, Any], workers: Workers) -> dict[str, float]:
        """Return what a step cost, and the run so far; nothing if its workers are not known."""
        if row["step"] == 0:
            return {}
        area = "cost" if workers.has_prices else "device_seconds"
        costs = by_use(self._costs.add(row, workers).accounts) if workers.tenures else {}
        costs |= {"total": sum(self._costs.total.values())} if costs else {}
        return {f"{area}/{use}": cost for use, cost in costs.items()}

    def _deliver_evaluations(self) -> None:
        if not self._layout.evaluations.exists():
            return
        version = open_dataset(self._layout.evaluations).version
        if version == self._evaluations_version:
            return
        run = Run(self._layout.root)
        evaluations = _list_evaluations(run)
        if not evaluations:  # they are being written, or a driver died over them
            return
        for evaluation in evaluations:
            self._deliver_evaluation(run, evaluation)
        samples = read_examples(run, evaluations)
        self._attempt("the sample answers", self._sink.show_samples, samples)
        self._evaluations_version = version

    def _deliver_evaluation(self, run: Run, evaluation: Mapping[str, Any]) -> None:
        name, version = evaluation["evaluation"], evaluation["policy_version"]
        num_answers, at = evaluation["count_all"], _milliseconds(evaluation["evaluated_at_max"])
        if self._num_answers.get((name, version)) == num_answers:
            return
        answers = run.evaluations("arrow", columns=_SCORE_COLUMNS, where=answers_of(evaluation))
        table = tabulate(answers.to_pylist(), threshold=run.pass_threshold)
        self._pass_rates[version] = table.overall.passed.pass_rate
        metrics, log = held_out_metrics(table), self._sink.log_evaluation
        self._attempt(f"evaluation {name}", log, version, metrics, timestamp_ms=at)
        self._num_answers[name, version] = num_answers

    def _deliver_checkpoints(self) -> None:
        root, tags, rates = self._layout.checkpoints, self._tags, self._pass_rates
        hashes = {step: each for step, each in checkpoint_hashes(root).items() if step in tags}
        checkpoints = hashes, rates.copy()
        if checkpoints == self._checkpoints:
            return
        present = {
            checkpoint_path(root, step): {
                **tags[step],
                "weights_hash": weights_hash,
                **_rate_tag(PASS_RATE_TAG, rates.get(step)),
            }
            for step, weights_hash in hashes.items()
            if is_recorded(step, weights_hash, tags[step], self._layout.forks)
        }
        self._attempt("checkpoints", self._sink.register_checkpoints, present)
        self._checkpoints = checkpoints

    def _checkpoint_tags(self, row: Mapping[str, Any]) -> dict[str, str]:
        return {
            "step": str(row["step"]),
            "run": self._layout.name,
            "weights_hash": row["weights_hash"],
            "trajectories_watermark": str(row["trajectory_watermark"]),
            TRAINED_AT_TAG: row["committed_at"].isoformat(),
            **_rate_tag(BATCH_PASS_RATE_TAG, row["metrics"].get(PASS_RATE)),
        }


@dataclass(frozen=True, slots=True)
class FineTuningProjection:
    """Delivers what one sink lacks of a finished run of fine-tuning alone, which has no ledger."""

    layout: RunLayout
    sink: Tracker

    def deliver(self) -> int:
        delivered = self.sink.begin()
        self.sink.describe(describe_run(self.layout))
        rows = read_metrics(self.layout)
        shown = evenly_spaced(rows, MAX_FINE_TUNING_POINTS)
        written = int(self.layout.sft_metrics.stat().st_mtime * 1000) if rows else 0
        new = [
            StepMetrics(int(row["step"]), _training_metrics(row), written)
            for row in shown
            if row["step"] > delivered
        ]
        if new:
            self.sink.log_steps(new)
        self._register()
        return len(new)

    def _register(self) -> None:
        root, layout = self.layout.sft_checkpoints, self.layout
        inputs = read_inputs(layout)
        rows_hash = inputs.files[layout.sft_rows.relative_to(layout.root).as_posix()]
        present = {}
        for step, weights_hash in checkpoint_hashes(root).items():
            path = checkpoint_path(root, step)
            trained_at = datetime.fromtimestamp((path / "state.json").stat().st_mtime, UTC)
            present[path] = {
                "step": str(step),
                "run": layout.name,
                "weights_hash": weights_hash,
                "rows_hash": rows_hash,
                "rows": ", ".join(inputs.sources),
                TRAINED_AT_TAG: trained_at.isoformat(),
            }
        self.sink.register_checkpoints(present)


def _list_evaluations(run: Run) -> list[dict[str, Any]]:
    keys = ["evaluation", "policy_version", "verifier"]
    answers = run.evaluations("arrow", columns=[*keys, "evaluated_at"])
    evaluations = answers.group_by(keys).aggregate([("evaluated_at", "max"), ([], "count_all")])
    return evaluations.sort_by("evaluated_at_max").to_pylist()  # type: ignore[no-any-return]


def _training_metrics(row: Mapping[str, float]) -> dict[str, float]:
    return {f"train/{name}": value for name, value in row.items() if name != "step"}


def _rate_tag(name: str, rate: float | None) -> dict[str, str]:
    return {} if rate is None else {name: f"{rate:.6f}"}


def _milliseconds(moment: Any) -> int:
    return int(moment.timestamp() * 1000)


def read_examples(run: Run, evaluations: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the first answers of evenly spaced policies to one prompt of each difficulty.

    Args:
        evaluations: `evaluation`, `policy_version` and `verifier` of each, in order; only those
            with the last one's verifier are shown.
    """
    alike = [each for each in evaluations if each["verifier"] == evaluations[-1]["verifier"]]
    by_difficulty = ["held_out", "difficulty"]
    prompts_of_version = run.evaluations(
        "arrow", columns=[*by_difficulty, "prompt_id"], where=_first_answers(evaluations[-1:])
    )
    prompts = prompts_of_version.group_by(by_difficulty).aggregate([("prompt_id", "min")])
    prompts = prompts.sort_by([(name, "ascending") for name in by_difficulty])[:MAX_EXAMPLE_PROMPTS]
    ids = ", ".join(
        "'{}'".format(prompt_id.replace("'", "''"))
        for prompt_id in prompts["prompt_id_min"].to_pylist()
    )
    shown = _first_answers(evenly_spaced(alike, MAX_EXAMPLE_VERSIONS))
    answers = run.evaluations(
        "arrow",
        columns=[*_EXAMPLE_COLUMNS, "held_out", "prompt_id", "evaluated_at"],
        where=f"{shown} AND prompt_id IN ({ids})",
    )
    order = [*by_difficulty, "prompt_id", "evaluated_at"]
    answers = answers.sort_by([(name, "ascending") for name in order])
    rows = answers.select(_EXAMPLE_COLUMNS).to_pylist()
    threshold = run.pass_threshold
    return [{**row, "passed": passes(row["reward"], threshold=threshold)} for row in rows]


def evenly_spaced(rows: Sequence[Any], max_rows: int) -> list[Any]:
    """Return about `max_rows` rows, evenly spaced, with the first and the last."""
    spacing = -(-len(rows) // max_rows) or 1
    return [*rows[:-1:spacing], *rows[-1:]]


def answers_of(evaluation: Mapping[str, Any]) -> str:
    name, version = evaluation["evaluation"], evaluation["policy_version"]
    return f"evaluation = '{name}' AND policy_version = {version}"


def _first_answers(evaluations: Sequence[Mapping[str, Any]]) -> str:
    return f"sample = 0 AND ({' OR '.join(map(answers_of, evaluations))})"
