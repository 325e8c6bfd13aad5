"""One row a trajectory: the events of the log. Appended once, never changed."""

from __future__ import annotations

import pandera.polars as pa
import polars as pl
from pandera.api.polars.types import PolarsData

from areal_flow.core.layout import SCHEMA_VERSION

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
