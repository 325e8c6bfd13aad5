"""The columns of every table: one row per trajectory, training step, prompt or held-out answer.

Trajectories are the events of the log, appended once and never changed; steps are their order, row
0 being the genesis. Columns of a step are what the accounting and the audit need of every step.
What one algorithm computes goes into `metrics`, so that a new metric changes no schema.
"""

from __future__ import annotations

import pandera.polars as pa
import polars as pl
from pandera.api.polars.types import PolarsData

from areal_flow.core.layout import SCHEMA_VERSION

TOOL_CALL = {
    "turn": pl.Int32,
    "name": pl.String,
    "arguments": pl.String,
    "result": pl.String,
    "exit_code": pl.Int32,
    "duration_s": pl.Float64,
}
FINISH_REASONS = ("stop", "length", "error")


class TrajectoryRow(pa.DataFrameModel):
    """A scored completion with everything that training, replay and lineage need; or a failure.

    `output_tokens`, `behavior_logprobs` and `loss_mask` are aligned token by token, and the
    lengths of `version_spans` add up to the same number.
    """

    trajectory_id: str = pa.Field(unique=True, description="<group_id>-<member>-<branch>")
    group_id: str = pa.Field(description="<submission_index, 8 digits>")
    submission_index: pl.Int64 = pa.Field(ge=0, description="fixes prompt, seeds and ids")
    member: pl.Int32 = pa.Field(ge=0, description="position within the group")
    branch: pl.Int32 = pa.Field(
        ge=0, description="which of its member's trajectories; 0 unless a conversation branched"
    )
    attempt: pl.Int32 = pa.Field(ge=0, description="how many earlier tries of the group failed")
    seed: pl.Int64 = pa.Field(ge=0, description="of the member; a turn's follows from it")
    writer_epoch: pl.Int32 = pa.Field(ge=1, description="which driver wrote it")
    prompt_id: str
    source: str = pa.Field(description="which of the run's sources; empty where it has one")
    difficulty: pl.Int32 = pa.Field(ge=0)
    prompt_tokens: pl.List(pl.Int32)
    output_tokens: pl.List(pl.Int32)
    behavior_logprobs: pl.List(pl.Float32) = pa.Field(
        description="of the distribution sampled from"
    )
    loss_mask: pl.List(pl.Boolean) = pa.Field(
        description="False where the policy did not choose the token"
    )
    version_spans: pl.List(pl.Struct({"version": pl.Int32, "length": pl.Int32}))
    finish_reason: str = pa.Field(
        isin=FINISH_REASONS, description="'error' where the workflow failed: there are no tokens"
    )
    reward: pl.Float64 = pa.Field(
        nullable=True, description="null when the workflow or the verifier failed"
    )
    reward_detail: str = pa.Field(description="JSON: verdict, what was extracted, any error")
    reward_parts: pl.List(pl.Struct({"name": pl.String, "reward": pl.Float64})) = pa.Field(
        description="what each reward of the recipe gave, before weights and discounts"
    )
    tool_calls: pl.List(pl.Struct(TOOL_CALL)) = pa.Field(
        description="of the workflow tool_use: arguments as JSON, the result as the policy read it"
    )
    verifier: str = pa.Field(description="names and hashes of the code that scored it")
    generator: str
    submitted_at: pl.Datetime("us", "UTC")
    started_at: pl.Datetime("us", "UTC")
    finished_at: pl.Datetime("us", "UTC")
    scored_at: pl.Datetime("us", "UTC")
    content_hash: str = pa.Field(description="of tokens, log-probabilities, mask, spans, reward")
    schema_version: pl.Int32 = pa.Field(eq=SCHEMA_VERSION)

    class Config:
        strict = True

    @pa.dataframe_check(name="output_tokens, behavior_logprobs and loss_mask have equal lengths")
    def token_columns_align(cls, rows: PolarsData) -> pl.LazyFrame:
        length = pl.col("output_tokens").list.len()
        aligned: pl.LazyFrame = rows.lazyframe.select(
            (pl.col("behavior_logprobs").list.len() == length)
            & (pl.col("loss_mask").list.len() == length)
        )
        return aligned

    @pa.dataframe_check(name="a failed workflow has neither tokens nor a reward")
    def failures_are_empty(cls, rows: PolarsData) -> pl.LazyFrame:
        is_empty = (pl.col("output_tokens").list.len() == 0) & pl.col("reward").is_null()
        empty: pl.LazyFrame = rows.lazyframe.select((pl.col("finish_reason") != "error") | is_empty)
        return empty

    @pa.dataframe_check(name="version_spans cover every output token")
    def spans_cover_output(cls, rows: PolarsData) -> pl.LazyFrame:
        spanned = pl.col("version_spans").list.eval(pl.element().struct.field("length")).list.sum()
        covered: pl.LazyFrame = rows.lazyframe.select(spanned == pl.col("output_tokens").list.len())
        return covered


class StepRow(pa.DataFrameModel):
    """What one step consumed, from which policy it started and which policy it made."""

    step: pl.Int64 = pa.Field(ge=0, description="the version this step made; 0 is the genesis")
    policy_version: pl.Int64 = pa.Field(ge=0, description="the version it started from")
    writer_epoch: pl.Int32 = pa.Field(ge=1)

    trajectory_ids: pl.List(pl.String) = pa.Field(description="trained, in canonical order")
    batch_digest: str = pa.Field(description="hash of trajectory_ids and policy_version")
    discarded: pl.List(pl.Struct({"trajectory_id": pl.String, "reason": pl.String})) = pa.Field(
        description="committed but never trained, decided since the previous row"
    )
    failed_submissions: pl.List(pl.Int64) = pa.Field(
        description="groups given up since the previous row"
    )
    num_failed_members: pl.Int64 = pa.Field(
        ge=0, description="trajectories without a reward: the workflow or the verifier failed"
    )
    next_submission_index: pl.Int64 = pa.Field(ge=0, description="the prompt cursor")
    trajectory_watermark: pl.Int64 = pa.Field(
        ge=0, description="rows in the log when this row was written"
    )

    parent_hash: str = pa.Field(
        description="weights_hash of the row before, or of its fork in forks.jsonl; empty at first"
    )
    weights_hash: str = pa.Field(description="of the master weights")
    served_hash: str = pa.Field(description="of the weights as generators load them")

    num_generated_tokens: pl.Int64 = pa.Field(ge=0, description="committed since the previous row")
    num_trained_tokens: pl.Int64 = pa.Field(ge=0)
    num_masked_tokens: pl.Int64 = pa.Field(
        ge=0, description="too old for gradient, kept as context"
    )
    num_discarded_tokens: pl.Int64 = pa.Field(ge=0)
    num_waiting_tokens: pl.Int64 = pa.Field(
        ge=0, description="committed, not yet consumed, after this step"
    )
    masked_fraction_by_decile: pl.List(pl.Float64) = pa.Field(
        description="by position in the completion"
    )
    importance_weight_means: pl.List(pl.Float32) = pa.Field(
        description="of each trained trajectory's tokens: their probability by policy_version's "
        "policy over that when sampled; null where no token was trained or it was not computed"
    )
    importance_weight_maxima: pl.List(pl.Float32) = pa.Field(description="the same, maxima")
    staleness_mean: pl.Float64 = pa.Field(ge=0, description="over trained tokens, in versions")
    staleness_max: pl.Int64 = pa.Field(ge=0)

    reward_mean: pl.Float64
    completion_tokens_mean: pl.Float64
    loss: pl.Float64 = pa.Field(nullable=True)
    grad_norm: pl.Float64 = pa.Field(nullable=True)
    learning_rate: pl.Float64 = pa.Field(ge=0)
    metrics: pl.Map(pl.String, pl.Float64) = pa.Field(
        description="what the algorithm computes besides, by name"
    )

    config_hash: str
    code_version: str
    verifier: str = pa.Field(
        description="names and hashes of the code that scored since its driver"
    )
    numeric_environment: str = pa.Field(description="JSON: threads, CPU capability, torch, dtype")

    wait_s: pl.Float64 = pa.Field(ge=0, description="for a batch")
    read_s: pl.Float64 = pa.Field(ge=0, description="tokens from Lance")
    train_s: pl.Float64 = pa.Field(ge=0, description="proximal pass, gradients, updates")
    stage_s: pl.Float64 = pa.Field(ge=0, description="hash and write the new weights aside")
    generate_s: pl.Float64 = pa.Field(
        ge=0, description="generators' busy time since the previous row"
    )
    step_s: pl.Float64 = pa.Field(ge=0, description="from the previous row to this one")
    committed_at: pl.Datetime("us", "UTC")

    class Config:
        strict = True


class PromptRow(pa.DataFrameModel):
    """A prompt ready to be rolled out: rendered by the template and tokenised once."""

    prompt_id: str = pa.Field(
        str_length={"min_value": 1},
        description="unique but for equal rows; ID or SOURCE/ID",
    )
    prompt: str = pa.Field(str_length={"min_value": 1}, description="text after the template")
    answer: str = pa.Field(
        str_length={"min_value": 1}, description="the right answer: text, or its value as JSON"
    )
    difficulty: pl.Int32 = pa.Field(
        ge=0, description="the source's own measure; 0 when it has none"
    )
    source: str = pa.Field(description="which of the run's sources; empty where it has one")
    metadata: str = pa.Field(description="JSON: the row's columns for the reward, `answer` typed")
    prompt_tokens: pl.List(pl.Int32) = pa.Field(description="token ids, never tokenised again")

    class Config:
        strict = True


class EvaluationRow(pa.DataFrameModel):
    """A sampled answer to a prompt that training never sees."""

    evaluation: str = pa.Field(description="'before', 'after', 'step-' and a step, or a caller's")
    writer_epoch: pl.Int32 = pa.Field(ge=0, description="which driver wrote it; 0 is none")
    policy_version: pl.Int64 = pa.Field(
        ge=0, description="the oldest that sampled an answer of this evaluation"
    )
    version_spans: pl.List(pl.Struct({"version": pl.Int32, "length": pl.Int32})) = pa.Field(
        description="which versions sampled this answer; empty where there is none"
    )
    held_out: str = pa.Field(description="the name of its held-out set")
    prompt_id: str
    sample: pl.Int32 = pa.Field(ge=0, description="which of the prompt's answers")
    difficulty: pl.Int32 = pa.Field(ge=0)
    prompt: str
    completion: str
    answer: str
    num_output_tokens: pl.Int32 = pa.Field(ge=0)
    finish_reason: str = pa.Field(description="'error' where the prompt could not be answered")
    reward: pl.Float64 = pa.Field(nullable=True)
    reward_detail: str
    verifier: str = pa.Field(description="names and hashes of the code that scored it")
    evaluated_at: pl.Datetime("us", "UTC")

    class Config:
        strict = True
