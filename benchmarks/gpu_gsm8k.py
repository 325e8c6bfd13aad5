"""SmolLM2 learns GSM8K on one GPU: fine-tuned, trained, killed, resumed, evaluated, replayed.

Two commands, each within `--budget-s` seconds, in one folder `--root`:

    python -m benchmarks.gpu_gsm8k first --model DIRECTORY --data FOLDER --root ROOT
    python -m benchmarks.gpu_gsm8k second --model DIRECTORY --data FOLDER --root ROOT [--json FILE]

`first` fine-tunes the model on the training answers, answers the test problems, and trains until it
kills the driver (`kill -9`) half-way. `second` resumes the run, answers the test problems again,
audits the run and replays its last step. If little time is left, fewer steps are trained. Without
a run in ROOT, `second` makes a short one first.

FOLDER has GSM8K's own `train.jsonl` and `test.jsonl`, a JSON object a line with `question` and
`answer` ("... #### 72"). `--tiny` needs neither: a tiny policy learns made-up sums on a CPU.
`--settings "a.b=c d.e=f"` overrides the recipe; `--plan FILE` is what `areal-flow plan --json` has
printed, for machines whose torch cannot plan.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from time import monotonic
from typing import Any

from areal_flow.config import load_recipe
from areal_flow.core.layout import RunLayout
from areal_flow.core.machine import gpus_here
from areal_flow.core.pass_rates import PASS_RATE, compare_answers, evaluation_scores
from areal_flow.log.queries import Run
from areal_flow.policy.checkpoints import checkpoint_path, list_checkpoints
from benchmarks import harness
from pipelines.jobs.job import recipe_path

RECIPE = "gsm8k-smollm"
FINE_TUNING, NAME = "fine-tuning", "gsm8k"
"""Names of the two runs."""
PARTS = {"first": "first.json", "second": "second.json"}
"""Commands, and the file in the folder that has the parts of each as far as it came."""
PLAN = "plan.json"
KILL_S = 15.0
"""Time for workers to notice that their driver is dead."""
AFTER_TRAINING_S = 110.0
"""Time for the last evaluation (20), the end of the run (20), the audit (20), the replay (50)."""
MIN_TRAINING_S = 1.0
SHORT = {"sft_steps": 100, "kill_after": 2}
"""What `second` does of `first` where there is no run."""
NUM_SHOWN = 5
"""Steps over which the pass rate of training problems is averaged."""
NUM_LOG_LINES = 30
HELD_OUT_TITLE = "Test problems, greedy"
_CALCULATION = re.compile("<<.*?>>")
TINY_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
TINY: dict[str, object] = {
    "prompts.num-held-out": 16,
    "sft.num-steps": 20,
    "generation.engine": "torch",
    "generation.device": "cpu",
    "generation.dtype": "float32",
    "generation.max-new-tokens": 16,
    "generation.max-model-len": 192,
    "generation.max-num-seqs": 32,
    "generation.vllm.gpu-memory-utilization": 0.9,
    "controller.batch-size": 16,
    "trainer.device": "cpu",
    "trainer.dtype": "float32",
    "trainer.tokens-per-micro-batch": 2048,
    "trainer.checkpoint-every-steps": 2,
    "cluster.num-gpus": 0,
    "cluster.num-reward-workers": 1,
}
TINY_STEPS = 6


class Parts:
    """The rows of a command's table, kept in a file after each part."""

    def __init__(self, path: Path, budget_s: float) -> None:
        self._path, self._began, self._budget_s = path, monotonic(), budget_s
        self.rows: list[dict[str, Any]] = []

    def left_s(self) -> float:
        return self._budget_s - (monotonic() - self._began)

    def run(self, part: str, work: Callable[[], str]) -> None:
        """Do a part, whose result is a text."""
        results: list[str] = []
        seconds = harness.seconds_of(lambda: results.append(work()))
        self.add(part, results[0], seconds)

    def add(self, part: str, result: str, seconds: float = 0.0) -> None:
        self.rows.append({"part": part, "seconds": seconds, "result": result})
        self._path.write_text(json.dumps(self.rows, indent=2) + "\n")
        print(f"{part}: {result} ({seconds:.1f} s)", flush=True)


def seconds_to_kill(left_s: float) -> float:
    """Return how long the first driver may live, with its start."""
    return max(0.0, left_s - KILL_S)


def minutes_of_training(left_s: float) -> float:
    """Return `max_minutes` of the second driver, its start included."""
    return max(MIN_TRAINING_S, left_s - AFTER_TRAINING_S) / 60


def sft_row(row: Mapping[str, str], template: str) -> dict[str, Any]:
    """Return a row of GSM8K as messages; answers lose their calculator annotations."""
    question = template.replace("{question}", row["question"])
    answer = _CALCULATION.sub("", row["answer"])
    return {"messages": [message("user", question), message("assistant", answer)]}


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tiny(root: Path) -> tuple[Path, Path]:
    """Write a tiny chat model and made-up sums as in GSM8K; return their folders."""
    from areal_flow.policy.models.huggingface import AutoConfig  # torch
    from benchmarks.shapes import drawn_policy
    from pipelines.tiny_jobs.tiny_policy import write_tiny_model

    model, data = root / "model", root / "data"
    if data.exists():
        return model, data
    write_tiny_model(model, max_model_len=256)
    (model / "chat_template.jinja").write_text(TINY_TEMPLATE)
    drawn_policy(AutoConfig.from_pretrained(model)).save_pretrained(model)
    data.mkdir()
    pairs = [(n % 19, n % 17) for n in range(160)]
    rows: list[dict[str, Any]] = [
        {"question": f"{a} + {b} =", "answer": f"<<{a}+{b}={a + b}>> #### {a + b}"}
        for a, b in pairs
    ]
    write_rows(data / "train.jsonl", rows[:128])
    write_rows(data / "test.jsonl", rows[128:])
    return model, data


def settings_of(chosen: argparse.Namespace) -> dict[str, object]:
    """Return what all commands override in the recipe."""
    given = dict(pair.split("=", 1) for pair in chosen.settings.split())
    return {"tracking.enabled": "false", **(TINY if chosen.tiny else {}), **given}


def output_of(chosen: argparse.Namespace, *words: object) -> str:
    return harness.output_of([*harness.CLI, *map(str, words)], cwd=chosen.root)


def last_line(printed: str) -> str:
    return f"failed: {(printed.strip() or 'it printed nothing').splitlines()[-1]}"


def start_plan(chosen: argparse.Namespace) -> subprocess.Popen[str] | None:
    """Start the planner beside fine-tuning, on an idle core, unless its figures are given."""
    if chosen.plan:
        return None
    settings = settings_of(chosen) | {"model": chosen.model, "num-steps": chosen.steps}
    options = ["--gpus", "1", "--gpu", "CPU" if chosen.tiny else chosen.gpu, "--json"]
    command = [*harness.CLI, "plan", RECIPE, *options, *harness.flags(settings)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=chosen.root, env=harness.environment(), stdout=pipe, stderr=pipe, text=True
    )


def keep_plan(chosen: argparse.Namespace, planner: subprocess.Popen[str] | None) -> str:
    """Keep the planner's figures, and return them as a text.

    A run goes on without them: a torch may be too old to plan a GPU's memory.
    """
    printed, errors = planner.communicate() if planner else (chosen.plan.read_text(), "")
    if not printed.startswith("{"):
        return last_line(errors)
    (chosen.root / PLAN).write_text(printed)
    planned = json.loads(printed)
    memory = planned["memory"]
    return (
        f"{planned['step_s']:.1f} s a step, {memory['trainer_rank_gib']:.1f} of "
        f"{memory['gpu_gib']:.1f} GiB for the trainer"
    )


def fine_tune(chosen: argparse.Namespace, num_steps: int) -> str:
    layout = RunLayout(chosen.root / "runs" / FINE_TUNING)
    if list_checkpoints(layout.sft_checkpoints):
        return "kept as it is"
    template = load_recipe(recipe_path(Path(RECIPE))).prompts.template
    lines = (chosen.data / "train.jsonl").read_text().splitlines()
    rows = [sft_row(json.loads(line), template) for line in lines]
    settings = settings_of(chosen) | {
        "name": FINE_TUNING,
        "model": chosen.model,
        "data": write_rows(chosen.root / "answers.jsonl", rows),
        **({"sft.num-steps": num_steps} if num_steps else {}),
    }
    output_of(chosen, "sft", RECIPE, *harness.flags(settings))
    losses = [json.loads(line)["loss"] for line in layout.sft_metrics.read_text().splitlines()]
    return f"{len(losses)} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}"


def train_and_kill(chosen: argparse.Namespace, num_steps: int, limit_s: float) -> str:
    policies = RunLayout(chosen.root / "runs" / FINE_TUNING).sft_checkpoints
    settings = settings_of(chosen) | {
        "name": NAME,
        "model": checkpoint_path(policies, list_checkpoints(policies)[-1]),
        "data": chosen.data / "train.jsonl",
        "prompts.held-out-path": chosen.data / "test.jsonl",
        "num-steps": chosen.steps,
    }
    command = [*harness.CLI, "train", RECIPE, *harness.flags(settings)]
    newest = harness.kill_driver(command, chosen.root, NAME, num_steps=num_steps, limit_s=limit_s)
    if newest < num_steps:  # too slow, or something is wrong
        log = (chosen.root / harness.DRIVER_LOG).read_text().splitlines()
        print(f"time was up before step {num_steps}:", *log[-NUM_LOG_LINES:], sep="\n", flush=True)
    return f"killed at step {newest}" if newest >= 0 else "killed before version 0"


def answers_of(run: Run, evaluation: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]]
    rows = run.evaluations("arrow", where=f"evaluation = '{evaluation}'").to_pylist()
    return rows


def held_out_row(name: str, run: Run, answers: list[dict[str, Any]]) -> dict[str, Any]:
    scores = evaluation_scores(answers, threshold=run.pass_threshold)
    passed = scores.passed
    return {
        "": name,
        "prompts": passed.n,
        "pass_rate": f"{passed.pass_rate:.4f}",
        "95%": f"{passed.low:.4f} to {passed.high:.4f}",
        "mean_tokens": scores.mean_tokens,
    }


def compared_rows(run: Run) -> list[dict[str, Any]]:
    """Return pass rates of the test problems before and after, and their paired difference."""
    before, after = answers_of(run, "before"), answers_of(run, "after")
    rows = [held_out_row("before RL", run, before), held_out_row("after RL", run, after)]
    paired = compare_answers(before, after, threshold=run.pass_threshold)
    changes = f"{paired.num_better} better, {paired.num_worse} worse"
    difference = {
        "": "difference",
        "prompts": f"{changes}, p = {paired.p_value:.2g}",
        "pass_rate": f"{paired.difference:+.4f}",
        "95%": f"{paired.low:+.4f} to {paired.high:+.4f}",
        "mean_tokens": "",
    }
    return [*rows, difference]


def learning_rows(run: Run) -> list[dict[str, Any]]:
    """Return the pass rates of training prompts, as sampled, of the first and last five steps."""
    rates = run.steps("arrow", where="step > 0")[PASS_RATE].to_pylist()
    spans = {"first": rates[:NUM_SHOWN], "last": rates[-NUM_SHOWN:]}
    return [
        {"steps": f"{name} {len(span)} of {len(rates)}", "pass_rate": fmean(span)}
        for name, span in spans.items()
    ]


def speed_rows(run: Run, planned: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what was predicted, if it was, beside medians of the steps."""
    steps = run.steps("arrow", where="step > 0").to_pylist()
    counts = {"generated": "num_generated_tokens", "trained": "num_trained_tokens"}
    rows = [("step, s", planned.get("step_s"), median(step["step_s"] for step in steps))]
    for what, column in counts.items():
        rate = median(step[column] / step["step_s"] for step in steps)
        rows.append((f"tokens/s {what}", planned.get(f"{what}_tokens_per_second"), rate))
    staleness = median(step["staleness_mean"] for step in steps)
    rows.append(("staleness", planned.get("staleness_mean"), staleness))
    return [{"": name, "predicted": p, "measured": m} for name, p, m in rows]


def first(chosen: argparse.Namespace, parts: Parts, **short: int) -> None:
    """Fine-tune, plan, train and kill.

    Args:
        short: `sft_steps` and `kill_after`, instead of the recipe's and half of the steps.
    """
    planner = start_plan(chosen)
    parts.run("fine-tuning", lambda: fine_tune(chosen, short.get("sft_steps", 0)))
    parts.add("plan", keep_plan(chosen, planner))
    half, limit_s = short.get("kill_after", chosen.steps // 2), seconds_to_kill(parts.left_s())
    parts.run("training", lambda: train_and_kill(chosen, half, limit_s))
    run = Run(chosen.root / "runs" / NAME) if has_run(chosen) else None
    if run and (answers := answers_of(run, "before")):
        harness.report(None, {HELD_OUT_TITLE: [held_out_row("before RL", run, answers)]})


def second(chosen: argparse.Namespace, parts: Parts) -> int:
    """Resume, audit and replay; return the exit code."""
    minutes = minutes_of_training(parts.left_s())
    codes = [0]

    def resume() -> str:
        output_of(chosen, "train", "--resume", NAME, "--max-minutes", f"{minutes:.3f}")
        return f"to step {newest_step(chosen)} of {chosen.steps}"

    def judged(text_of: Callable[[dict[str, Any]], str], *words: str) -> str:
        """Return a text about what a command found, which ends with 1 if something is wrong."""
        command = [*harness.CLI, *words, "--json"]
        done = subprocess.run(
            command, cwd=chosen.root, env=harness.environment(), capture_output=True, text=True
        )
        codes.append(done.returncode)
        has_json = done.stdout.startswith("{")
        return text_of(json.loads(done.stdout)) if has_json else last_line(done.stderr)

    parts.run("resume", resume)
    parts.run("audit", lambda: judged(audit_text, "check", NAME))
    if newest := newest_step(chosen):
        replayed = f"{NAME}@{newest}"
        parts.run("replay", lambda: judged(replay_text, "replay", replayed))
    return max(codes)


def audit_text(audit: Mapping[str, Any]) -> str:
    severities = Counter(finding["severity"] for finding in audit["findings"])
    counts = ", ".join(f"{count} {severity}" for severity, count in severities.items())
    return f"{'clean' if audit['clean'] else 'NOT CLEAN'}: {counts or 'no findings'}"


def replay_text(replay: Mapping[str, Any]) -> str:
    return " ".join(replay["verdict"])


def has_run(chosen: argparse.Namespace) -> bool:
    return RunLayout(chosen.root / "runs" / NAME).config.is_file()


def newest_step(chosen: argparse.Namespace) -> int:
    return harness.newest_step(chosen.root, NAME)


def tables_of(chosen: argparse.Namespace, parts: Parts) -> dict[str, list[dict[str, Any]]]:
    run, earlier = Run(chosen.root / "runs" / NAME), chosen.root / PARTS["first"]
    rows = [*(json.loads(earlier.read_text()) if earlier.exists() else []), *parts.rows]
    rows.append({"part": "all", "seconds": sum(row["seconds"] for row in rows), "result": ""})
    device = "a CPU, `--tiny`" if chosen.tiny else gpus_here()
    tables = {f"`{RECIPE}` on {device}": rows, HELD_OUT_TITLE: compared_rows(run)}
    if newest_step(chosen):
        plan = chosen.root / PLAN
        planned = json.loads(plan.read_text()) if plan.exists() else {}
        tables["Training problems, sampled"] = learning_rows(run)
        tables["Speed"] = speed_rows(run, planned)
    return tables


def chosen_options(options: Sequence[str]) -> argparse.Namespace:
    paths = {"model": Path, "data": Path, "root": Path("gsm8k-run"), "plan": Path}
    names = {"gpu": "H100-80GB", "steps": 60, "budget_s": 350.0, "settings": "", "tiny": False}
    chosen = harness.parse_options(__doc__, options, **paths, **names)
    if wrong := [pair for pair in chosen.settings.split() if "=" not in pair]:
        sys.exit(f"--settings: expected section.setting=value, found {wrong[0]}")
    chosen.root = chosen.root.resolve()
    if chosen.tiny:
        chosen.root.mkdir(parents=True, exist_ok=True)
        chosen.model, chosen.data = write_tiny(chosen.root)
        chosen.steps = min(chosen.steps, TINY_STEPS)
    if not (chosen.model and chosen.data):
        sys.exit("expected --model and --data, or --tiny")
    chosen.model, chosen.data = chosen.model.resolve(), chosen.data.resolve()
    for file in (chosen.data / "train.jsonl", chosen.data / "test.jsonl"):
        if not file.is_file():
            sys.exit(f"{file}: expected GSM8K's rows, question and answer, found no file")
    if chosen.plan and not chosen.plan.is_file():
        sys.exit(f"--plan: expected what `areal-flow plan --json` printed, found no {chosen.plan}")
    chosen.root.mkdir(parents=True, exist_ok=True)
    return chosen


def main() -> None:
    command, *options = sys.argv[1:] or [""]
    if command not in PARTS:
        sys.exit(f"expected `first` or `second`, found {command!r}: see `first --help`")
    chosen = chosen_options(options)
    if command == "first" and has_run(chosen):
        sys.exit(f"{chosen.root} has a run: go on with `second`, or give another --root")
    parts = Parts(chosen.root / PARTS[command], chosen.budget_s)
    if command == "first":
        first(chosen, parts)
        return
    if not has_run(chosen):
        print(f"{chosen.root} has no run of `first`: making a short one", flush=True)
        first(chosen, parts, **SHORT)
    code = second(chosen, parts)
    harness.report(chosen.json, tables_of(chosen, parts))
    if code:
        sys.exit(code)


if __name__ == "__main__":
    main()
