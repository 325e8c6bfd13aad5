"""Damages to a run's files, each with the audit rule it breaks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import lance
import pyarrow as pa
import pyarrow.parquet as pq

from areal_flow.core.layout import RunLayout
from areal_flow.core.pass_rates import PASS_RATE
from areal_flow.log.codec import TRAJECTORIES
from areal_flow.log.dataset import COMMIT_ORDER, create_dataset
from areal_flow.log.directory import Parent, check_schema_version, record_parent
from areal_flow.log.index import read_index
from areal_flow.log.ledger import STEPS
from areal_flow.policy.checkpoints import checkpoint_path

Rows = list[dict[str, Any]]
Change = Callable[[Rows], object]
Damage = Callable[[RunLayout], object]


@dataclass(frozen=True)
class Edit:
    """Changes rows in place; as a damage, it rewrites them in commit order."""

    change: Callable[[RunLayout, Rows], object]
    is_ledger: bool

    def __call__(self, run: RunLayout) -> None:
        rows, path = self.changed(run), self.path(run)
        shutil.rmtree(path)
        create_dataset(path, rows.schema, stable_row_ids=not self.is_ledger)
        lance.write_dataset(rows, str(path), mode="append")

    def path(self, run: RunLayout) -> Path:
        return run.steps if self.is_ledger else run.trajectories

    def changed(self, run: RunLayout) -> pa.Table:
        schema = STEPS if self.is_ledger else TRAJECTORIES
        dataset = lance.dataset(str(self.path(run)))
        stored = dataset.to_table(columns=[*schema.names, COMMIT_ORDER]).sort_by(COMMIT_ORDER)
        rows: Rows = stored.select(schema.names).to_pylist()
        self.change(run, rows)
        return pa.Table.from_pylist(rows, schema=schema)


def edit_ledger(change: Change) -> Edit:
    return Edit(lambda _, rows: change(rows), is_ledger=True)


def edit_log(change: Change) -> Edit:
    return Edit(lambda _, rows: change(rows), is_ledger=False)


def edit_trained(change: Callable[[dict[str, Any]], object]) -> Edit:
    """Change a trajectory that step 3 trained."""

    def change_in(run: RunLayout, rows: Rows) -> None:
        ledger = lance.dataset(str(run.steps)).to_table(filter="step = 3")
        identifier = ledger["trajectory_ids"][0].as_py()[0]
        change(next(row for row in rows if row["trajectory_id"] == identifier))

    return Edit(change_in, is_ledger=False)


def put(at: int, **values: Any) -> Change:
    return lambda rows: rows[at].update(values)


def put_metric(at: int, name: str, value: float) -> Change:
    return lambda rows: rows[at].update(metrics={**dict(rows[at]["metrics"]), name: value})


def add(at: int, column: str, change: Any) -> Change:
    """Add to a number or to a list."""
    return lambda rows: rows[at].update({column: rows[at][column] + change})


def trained_again(rows: Rows) -> None:
    rows[3]["trajectory_ids"] = sorted(rows[3]["trajectory_ids"] + rows[2]["trajectory_ids"][:1])


def discard_trained(reason: str) -> Change:
    def change(rows: Rows) -> None:
        identifier = rows[2]["trajectory_ids"][0]
        rows[3]["discarded"] = [{"trajectory_id": identifier, "reason": reason}]

    return change


def discard_again(rows: Rows) -> None:
    rows[3]["discarded"] = rows[4]["discarded"] = [{"trajectory_id": "a", "reason": "stale"}]


def older_tokens_last(row: dict[str, Any]) -> None:
    tokens = len(row["output_tokens"])
    row["version_spans"] = [{"version": 1, "length": 1}, {"version": 0, "length": tokens - 1}]


def without_tokens(rows: Rows) -> None:
    for row in rows:
        row.update(output_tokens=[], behavior_logprobs=[])


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def cut_a_data_file(path: Path) -> None:
    referenced = lance.dataset(str(path)).get_fragments()[0].data_files()[0].path
    file = path / "data" / referenced
    file.write_bytes(file.read_bytes()[:-50])


def index_file(run: RunLayout) -> Path:
    """Return one that is in use: files that were merged stay for a while."""
    return run.index / read_index(run).parts[0]


def rewrite_index(run: RunLayout, columns: str) -> None:
    file = index_file(run)
    rows = duckdb.sql(f"SELECT {columns} FROM read_parquet('{file}')").to_arrow_table()
    pq.write_table(rows, file)


def checkpoint(run: RunLayout, step: int = 2) -> Path:
    return checkpoint_path(run.checkpoints, step)


def edit_state(run: RunLayout, **values: Any) -> None:
    file = checkpoint(run) / "state.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def edit_recipe(old: str, new: str) -> Damage:
    return lambda run: run.config.write_text(run.config.read_text().replace(old, new, 1))


def newest_weights(run: RunLayout) -> Path:
    return max(run.weights.rglob("model.safetensors"))


def publish_other_weights(run: RunLayout) -> None:
    newest, older = sorted(run.weights.rglob("model.safetensors"))[-1:-3:-1]
    for name in ("model.safetensors", "hash"):
        shutil.copy(older.parent / name, newest.parent / name)


def give_all_prompts_one_id(run: RunLayout, path: Path | None = None) -> None:
    path = path or run.train_prompts
    prompts = pa.ipc.open_file(path.read_bytes()).read_all()
    column = prompts.schema.get_field_index("prompt_id")
    prompts = prompts.set_column(column, "prompt_id", pa.array(["1"] * len(prompts)))
    with pa.ipc.new_file(str(path), prompts.schema) as writer:
        writer.write_table(prompts)


def break_evaluation(run: RunLayout) -> None:
    lance.dataset(str(run.evaluations)).update({"difficulty": "-1"}, where="evaluation = 'before'")


def other_fork(run: RunLayout) -> None:
    hashes = {"weights_hash": "no", "served_hash": "no"}
    run.forks.write_text(json.dumps({"step": 2, "recorded": hashes, "replayed": hashes}))


def name_a_parent(run: RunLayout, *, step: int, weights_hash: str) -> None:
    """Record that a run was forked from itself."""
    record_parent(run, Parent(check_schema_version(run), run.name, step, weights_hash, "kept"))


def name_another_parent(run: RunLayout) -> None:
    genesis = lance.dataset(str(run.steps)).to_table(filter="step = 0")["weights_hash"][0].as_py()
    name_a_parent(run, step=1, weights_hash=genesis)


UNSCORED = edit_trained(lambda row: row.update(reward=None))
DAMAGES: dict[str, tuple[str, Damage]] = {
    # the ledger alone
    "a step is gone": ("step-missing", edit_ledger(lambda rows: rows.pop(2))),
    "the genesis is gone": ("step-missing", edit_ledger(lambda rows: rows.pop(0))),
    "a step is there twice": ("step-twice", edit_ledger(lambda rows: rows.append(rows[2]))),
    "another parent": ("parent-hash", edit_ledger(put(3, parent_hash="0"))),
    "another policy version": ("policy-version", edit_ledger(put(3, policy_version=1))),
    "another batch": ("batch-digest", edit_ledger(put(2, batch_digest="0"))),
    "another order": ("batch-order", edit_ledger(lambda r: r[2]["trajectory_ids"].reverse())),
    "a genesis with a parent": ("genesis", edit_ledger(put(0, parent_hash="0"))),
    "a group too few": ("batch-size", edit_ledger(lambda r: r[2]["trajectory_ids"].clear())),
    "trained twice": ("trained-twice", edit_ledger(trained_again)),
    "discarded after training": ("trained-and-discarded", edit_ledger(discard_trained("stale"))),
    "discarded twice": ("discarded-twice", edit_ledger(discard_again)),
    "given up twice": ("given-up-twice", edit_ledger(put(3, failed_submissions=[70_000, 70_000]))),
    "too old": ("staleness-bound", edit_ledger(put(2, staleness_max=3))),
    "the watermark goes back": ("watermark-order", edit_ledger(put(4, trajectory_watermark=1))),
    "the cursor goes back": ("cursor-order", edit_ledger(put(4, next_submission_index=1))),
    "an older writer": ("epoch-order", edit_ledger(put(1, writer_epoch=2))),
    "another recipe": ("config-hash", edit_recipe("batch_size = 64", "batch_size = 32")),
    "a fork of another ledger": ("fork-recorded", other_fork),
    "not the policy that was forked": (
        "fork-genesis",
        lambda run: name_a_parent(run, step=0, weights_hash="0"),
    ),
    "not the parent's step": ("fork-parent", name_another_parent),
    "a row breaks its schema": ("schema", edit_ledger(put(2, learning_rate=-1.0))),
    # the ledger and the log
    "a wrong reason": ("discard-reason", edit_ledger(discard_trained("verifier_error"))),
    "no failed workflow": ("discard-reason", edit_ledger(discard_trained("workflow_error"))),
    "an unknown trajectory": (
        "unknown-trajectory",
        edit_ledger(add(4, "trajectory_ids", ["99999999-0000-00"])),
    ),
    "a trajectory is gone": ("unknown-trajectory", edit_log(lambda rows: rows.pop(0))),
    "trained before commit": (
        "consumed-before-commit",
        edit_log(lambda rows: rows.append(rows.pop(0))),
    ),
    "given up, yet committed": ("given-up-committed", edit_ledger(put(3, failed_submissions=[0]))),
    "rows of the log are gone": (
        "watermark-beyond-log",
        edit_ledger(put(4, trajectory_watermark=9999)),
    ),
    "the cursor is behind": ("cursor-behind-log", edit_ledger(put(4, next_submission_index=1))),
    "more tokens trained": ("step-tokens", edit_ledger(add(2, "num_trained_tokens", 1))),
    "more tokens generated": ("generated-tokens", edit_ledger(add(2, "num_generated_tokens", 1))),
    "tokens discarded": ("discarded-tokens", edit_ledger(add(2, "num_discarded_tokens", 1))),
    "more tokens waiting": ("waiting-tokens", edit_ledger(add(2, "num_waiting_tokens", 7))),
    "masked, not trained": ("staleness-counts", edit_ledger(add(2, "num_masked_tokens", 1))),
    "numbers that cannot be added": (
        "unreadable",
        edit_ledger(put(2, num_trained_tokens=2**63 - 1, num_masked_tokens=1)),
    ),
    "another mean reward": ("reward-mean", edit_ledger(add(2, "reward_mean", 0.5))),
    "another pass rate": ("batch-metrics", edit_ledger(put_metric(2, PASS_RATE, 2.0))),
    "a version from the future": (
        "newer-version",
        edit_trained(lambda row: row["version_spans"][-1].update(version=3)),
    ),
    "trained without a reward": ("trained-unscored", UNSCORED),
    "no mean of rewards": ("reward-mean", UNSCORED),
    "log-probabilities are not numbers": (
        "trained-not-finite",
        edit_trained(lambda row: row["behavior_logprobs"].__setitem__(0, float("nan"))),
    ),
    # trajectories
    "versions go back": ("versions-decrease", edit_trained(older_tokens_last)),
    "another token": (
        "content-hash",
        edit_trained(lambda row: row["output_tokens"].__setitem__(0, row["output_tokens"][0] + 1)),
    ),
    "another log-probability": (
        "content-hash",
        edit_log(lambda rows: rows[-1]["behavior_logprobs"].__setitem__(0, -0.125)),
    ),
    "token columns differ in length": (
        "schema",
        edit_trained(lambda row: row["behavior_logprobs"].pop()),
    ),
    "all tokens are gone": ("tokens-dropped", edit_log(without_tokens)),
    "an id twice": ("trajectory-twice", edit_log(lambda rows: rows.append(rows[0]))),
    "another id": ("trajectory-id", edit_log(add(-1, "trajectory_id", "0"))),
    "another group": ("group-id", edit_log(put(-1, group_id="0"))),
    "a member too many": ("group-size", edit_log(put(-1, member=4))),
    "another seed": ("seed", edit_log(add(-2, "seed", 1))),
    "another run seed": ("prompt", edit_recipe("seed = 0", "seed = 1")),
    "another prompt": ("prompt", edit_log(add(-2, "prompt_tokens", [1]))),
    "other prompts": ("prompt", lambda run: run.held_out_prompts.replace(run.train_prompts)),
    "an id of two prompts": ("prompt-id", give_all_prompts_one_id),
    "an id of two held-out prompts": (
        "prompt-id",
        lambda run: give_all_prompts_one_id(run, run.held_out_prompts),
    ),
    "another verifier in the ledger": ("verifier", edit_ledger(put(2, verifier="other@1"))),
    "another verifier": ("trajectory-verifier", edit_log(put(-2, verifier="other@1"))),
    "regraded": ("trained-other-verifier", edit_trained(lambda row: row.update(verifier="x@1"))),
    # checkpoints and published weights
    "checkpoint weights changed": (
        "checkpoint-weights",
        lambda run: flip_a_byte(checkpoint(run) / "model.safetensors"),
    ),
    "checkpoint optimizer changed": (
        "checkpoint-optimizer",
        lambda run: flip_a_byte(checkpoint(run) / "optimizer.safetensors"),
    ),
    "a checkpoint of another ledger": (
        "checkpoint-ledger",
        lambda run: edit_state(run, next_submission_index=0),
    ),
    "a checkpoint of another step": ("checkpoint-step", lambda run: edit_state(run, step=1)),
    "a checkpoint's file is cut": (
        "checkpoint-unreadable",
        lambda run: (checkpoint(run) / "model.safetensors").write_bytes(b"0"),
    ),
    "a checkpoint without state": (
        "checkpoint-unreadable",
        lambda run: (checkpoint(run) / "state.json").unlink(),
    ),
    "a checkpoint of no step": (
        "checkpoint-beyond-ledger",
        lambda run: checkpoint(run, 4).rename(checkpoint(run, 9)),
    ),
    "no first checkpoint": ("checkpoint-missing", lambda run: shutil.rmtree(checkpoint(run, 0))),
    "a checkpoint of another model": (
        "checkpoint-model",
        lambda run: (checkpoint(run) / "config.json").write_text("{}"),
    ),
    "published weights changed": ("weights-hash", lambda run: flip_a_byte(newest_weights(run))),
    "another version published": ("weights-ledger", publish_other_weights),
    "half a published version": ("weights-unreadable", lambda run: newest_weights(run).unlink()),
    "weights of no step": (
        "weights-beyond-ledger",
        lambda run: newest_weights(run).parent.rename(newest_weights(run).parents[1] / "00000009"),
    ),
    # the index
    "another step in the index": (
        "index-differs",
        lambda run: rewrite_index(run, "* REPLACE (step + 1 AS step)"),
    ),
    "another reward in the index": (
        "index-differs",
        lambda run: rewrite_index(run, "* REPLACE (reward + 1 AS reward)"),
    ),
    "the index is cut": (
        "unreadable",
        lambda run: index_file(run).write_bytes(index_file(run).read_bytes()[:-9]),
    ),
    # files
    "no prompts": ("unreadable", lambda run: run.train_prompts.unlink()),
    "no recipe": ("unreadable", lambda run: run.config.unlink()),
    "an unknown setting": ("unreadable", lambda run: run.config.write_text("a = 1")),
    "a fragment is cut": ("unreadable", lambda run: cut_a_data_file(run.trajectories)),
    "no trajectories": ("unreadable", lambda run: shutil.rmtree(run.trajectories)),
    "the ledger is cut": ("unreadable", lambda run: cut_a_data_file(run.steps)),
    "no ledger": ("unreadable", lambda run: shutil.rmtree(run.steps)),
    "an evaluation breaks its schema": ("schema", break_evaluation),
    "evaluations are cut": ("unreadable", lambda run: cut_a_data_file(run.evaluations)),
    "no held-out prompts": ("unreadable", lambda run: run.held_out_prompts.unlink()),
    "no state": ("unreadable", lambda run: run.state.unlink()),
    "another model": ("input-changed", lambda run: (run.model / "config.json").write_text("{}")),
    "no tokenizer": ("unreadable", lambda run: (run.model / "tokenizer.json").unlink()),
    "forks are not JSON": ("unreadable", lambda run: run.forks.write_text("{")),
}
