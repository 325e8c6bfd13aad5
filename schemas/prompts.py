"""One row a prompt: what is asked, what is right, how hard it is."""

from __future__ import annotations

import pandera.polars as pa
import polars as pl


class PromptRow(pa.DataFrameModel):
    """A prompt ready to be rolled out: rendered by the template and tokenised once."""

    prompt_id: str = pa.Field(
        str_length={"min_value": 1}, description="names the question; equal texts may share it"
    )
    prompt: str = pa.Field(str_length={"min_value": 1}, description="text after the template")
    answer: str = pa.Field(
        str_length={"min_value": 1}, description="what the verifier compares with"
    )
    difficulty: pl.Int32 = pa.Field(
        ge=0, description="the source's own measure; 0 when it has none"
    )
    metadata: str = pa.Field(description="JSON: the row's other columns, for the reward")
    prompt_tokens: pl.List(pl.Int32) = pa.Field(description="token ids, never tokenised again")

    class Config:
        strict = True
