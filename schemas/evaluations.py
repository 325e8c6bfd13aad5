"""One row a held-out prompt answered by one policy version."""

from __future__ import annotations

import pandera.polars as pa
import polars as pl


class EvaluationRow(pa.DataFrameModel):
    """A sampled answer to a prompt that training never sees."""

    evaluation: str = pa.Field(description="'before', 'after' or a name of the caller's")
    writer_epoch: pl.Int32 = pa.Field(ge=0, description="which driver wrote it; 0 is none")
    policy_version: pl.Int64 = pa.Field(ge=0)
    prompt_id: str
    difficulty: pl.Int32 = pa.Field(ge=0)
    prompt: str
    completion: str
    answer: str
    num_output_tokens: pl.Int32 = pa.Field(ge=0)
    finish_reason: str = pa.Field(description="'error' where the prompt could not be answered")
    reward: pl.Float64 = pa.Field(nullable=True)
    reward_detail: str
    evaluated_at: pl.Datetime("us", "UTC")

    class Config:
        strict = True
