"""A registered version as `mlflow.pyfunc.load_model` opens it: prompts in, greedy completions out.

`MODEL_FILE` beside the weights says so to MLflow. It is JSON, which MLflow reads as YAML, so that
nothing of MLflow is imported to write it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from platform import python_version
from typing import Any

from areal_flow.core.durable import replace_file

MODEL_FILE = "MLmodel"
MAX_NEW_TOKENS = "max_new_tokens"


def write_signature(directory: Path, *, max_new_tokens: int) -> None:
    """Describe a policy's directory to MLflow; a reward model completes nothing."""
    config = directory / "config.json"
    if not config.is_file() or "CausalLM" not in config.read_text():
        return
    limit = {"name": MAX_NEW_TOKENS, "type": "long", "default": max_new_tokens, "shape": None}
    texts = json.dumps([{"type": "string", "required": True}])
    described = {
        "flavors": {
            "python_function": {"loader_module": __name__, "python_version": python_version()}
        },
        "signature": {
            "inputs": texts,
            "outputs": texts,
            "params": json.dumps([limit]),
        },
    }
    replace_file(directory / MODEL_FILE, json.dumps(described, indent=2))


def _load_pyfunc(directory: str) -> Completions:
    return Completions(Path(directory))


class Completions:
    """What MLflow calls: a prompt is a user's message where the policy has a chat template."""

    def __init__(self, directory: Path) -> None:
        from areal_flow.policy.models.policy import load_policy
        from areal_flow.policy.tokenizer.directory import (
            chat_template_of,
            stop_token_ids,
            tokenizer_of,
        )

        self._policy = load_policy(directory)
        self._policy.set_attn_implementation("sdpa")  # ours is for packed rows
        self._tokenizer = tokenizer_of(directory)
        self._chat = chat_template_of(directory)
        self._stop = [*stop_token_ids(directory)]

    def predict(self, prompts: Any, params: Mapping[str, Any] | None = None) -> list[str]:
        """Complete each prompt: a list of texts, or the frame of one column that MLflow makes."""
        texts = prompts if isinstance(prompts, list) else prompts.iloc[:, 0]
        limit = int((params or {})[MAX_NEW_TOKENS])
        return [self._complete(prompt, limit) for prompt in texts]

    def _complete(self, prompt: str, max_new_tokens: int) -> str:
        import torch

        from areal_flow.policy.tokenizer.directory import prompt_tokens, texts_of

        if self._chat is not None:
            prompt = self._chat.render([{"role": "user", "content": prompt}])
        tokens = prompt_tokens(self._tokenizer, prompt)
        with torch.inference_mode():
            generated = self._policy.generate(
                torch.tensor([tokens]),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=self._stop,
            )
        (completion,) = texts_of(self._tokenizer, [generated[0, len(tokens) :]])
        return completion
