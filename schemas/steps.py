"""One row a training step: the order of the log. Row 0 is the genesis, before any step.

Columns are what the accounting and the audit need of every step. What one algorithm computes goes
into `metrics`, so that a new metric changes no schema.
"""

from __future__ import annotations

import pandera.polars as pa
import polars as pl


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

    seconds_wait: pl.Float64 = pa.Field(ge=0, description="for a batch")
    seconds_read: pl.Float64 = pa.Field(ge=0, description="tokens from Lance")
    seconds_train: pl.Float64 = pa.Field(ge=0, description="proximal pass, gradients, updates")
    seconds_stage: pl.Float64 = pa.Field(ge=0, description="hash and write the new weights aside")
    seconds_generate: pl.Float64 = pa.Field(
        ge=0, description="generators' busy time since the previous row"
    )
    seconds_step: pl.Float64 = pa.Field(ge=0, description="from the previous row to this one")
    committed_at: pl.Datetime("us", "UTC")

    class Config:
        strict = True
