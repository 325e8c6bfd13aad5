"""The reward `reward_model`: a model scores prompt and completion.

The model is an `AutoModelForSequenceClassification` with one label, and its tokenizer. It runs on
the reward worker, in a thread. A hash of its files is part of the verifier's identity.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from areal_flow.core.digests import file_hash, sha256_hex
from areal_flow.core.errors import ModelError, RewardError
from areal_flow.core.types import Score
from areal_flow.policy.tokenizer.auto_tokenizer import auto_tokenizer
from areal_flow.policy.tokenizer.directory import prompt_tokens, resolve_model
from areal_flow.rewards.protocol import RewardInput, overlong

FILES = ("config.json", "tokenizer.json", "*.safetensors")
_KIND = "ForSequenceClassification"


class ModelReward:
    made_of = (Path(__file__),)

    def __init__(
        self,
        *,
        path: str,
        squash: bool = False,
        max_tokens: int = 4096,
        max_concurrency: int = 8,
        device: str = "cpu",
    ) -> None:
        """Locate the model.

        Args:
            path: a directory, or the name of a hub repository.
            squash: whether to apply a sigmoid to the score.
            max_tokens: of prompt and completion; longer ones get no score.
            max_concurrency: completions in one batch.
            device: a torch device.
        """
        if max_tokens < 1 or max_concurrency < 1:
            raise RewardError(
                "reward 'reward_model': expected max_tokens >= 1 and max_concurrency >= 1, found "
                f"{max_tokens} and {max_concurrency}"
            )
        self._squash, self._max_tokens = squash, max_tokens
        self._max_concurrency, self._device = max_concurrency, device
        try:
            self._directory = resolve_model(path)
            self.content_hash = _check(self._directory)
        except (ModelError, OSError, ValueError) as error:
            raise RewardError(f"reward 'reward_model', path = {path!r}: {error}") from None

    def open(self) -> None:
        from areal_flow.policy.models.huggingface import (
            AutoModelForSequenceClassification,
            without_progress_bars,
        )

        try:
            with without_progress_bars():
                model, loading_info = AutoModelForSequenceClassification.from_pretrained(
                    str(self._directory),
                    dtype="float32",
                    trust_remote_code=False,
                    use_safetensors=True,
                    local_files_only=True,
                    output_loading_info=True,
                )
            self._model = model.eval().to(self._device)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise RewardError(f"reward 'reward_model', {self._directory}: {error}") from error
        if missing := sorted(loading_info["missing_keys"]):
            raise RewardError(
                f"reward 'reward_model': {self._directory} lacks {', '.join(missing[:4])}, which "
                "would be drawn at random: save the whole model with save_pretrained"
            )
        longest = getattr(model.config, "max_position_embeddings", None) or self._max_tokens
        self._num_tokens, self._lock = min(self._max_tokens, longest), Lock()
        self._tokenizer = auto_tokenizer(self._directory)

    def close(self) -> None:
        del self._model

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        return await asyncio.to_thread(self._score, inputs)

    def _score(self, inputs: Sequence[RewardInput]) -> list[Score]:
        tokens = {index: self._tokens(item) for index, item in enumerate(inputs)}
        fitting = {index: ids for index, ids in tokens.items() if 0 < len(ids) <= self._num_tokens}
        order, logits = sorted(fitting, key=lambda index: len(fitting[index])), dict[int, float]()
        for begin in range(0, len(order), self._max_concurrency):
            batch = order[begin : begin + self._max_concurrency]
            with self._lock:
                batch_logits = self._logits([fitting[index] for index in batch])
            logits |= zip(batch, batch_logits, strict=True)
        return [
            self._judged(logits[index]) if index in logits else self._unscored(len(ids))
            for index, ids in tokens.items()
        ]

    def _tokens(self, item: RewardInput) -> list[int]:
        if overlong(item.completion):
            return []
        encoded = self._tokenizer.encode(item.completion, add_special_tokens=False)
        return [*prompt_tokens(self._tokenizer, item.prompt), *encoded.ids]

    def _logits(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        import torch

        longest, ends = max(map(len, sequences)), {ids[-1] for ids in sequences}
        padding = min(
            {*range(len(ends) + 1)} - ends
        )  # the model scores at the last token that is not padding
        self._model.config.get_text_config().pad_token_id = padding
        padded = [[*ids, *[padding] * (longest - len(ids))] for ids in sequences]
        mask = [[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences]
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.tensor(padded, device=self._device),
                attention_mask=torch.tensor(mask, device=self._device),
            )
        return [float(logit) for logit in output.logits[:, 0]]

    def _judged(self, logit: float) -> Score:
        if not self._squash:
            return Score(logit)
        return Score(0.5 * (1 + math.tanh(logit / 2)), message=f"score {logit:.6g}")

    def _unscored(self, num_tokens: int) -> Score:
        length = f"{num_tokens} tokens" if num_tokens else "nothing, or millions of characters"
        return Score(
            None, "output_limit", error=f"the reward model takes 1 to {self._num_tokens} tokens of "
            f"prompt and completion, found {length}: see max_tokens in its settings",
        )  # fmt: skip


def _check(directory: Path) -> str:
    files: list[Path] = []
    for pattern in FILES:
        matching = sorted(directory.glob(pattern))
        if not matching:
            raise ValueError(f"expected {pattern} of a reward model in {directory}, found none")
        files += matching
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    (kind, *_), labels = config.get("architectures") or [""], config.get("id2label", {0: "", 1: ""})
    if not kind.endswith(_KIND) or len(labels) != 1:
        raise ValueError(
            f"expected a model of {_KIND} with one label, found {kind or 'no architecture'} with "
            f"{len(labels)}: save it with num_labels = 1"
        )
    hashes = [f"{file.name} {file_hash(file)}" for file in files]
    return sha256_hex("\n".join(hashes), 12)
