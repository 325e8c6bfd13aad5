"""An exported fine-tuned policy: transformers gives the same answers as an evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import areal_flow
from pipelines.cli.main import main
from tests.real_model.rows import SAMPLE

NUM_PROMPTS, NUM_TOKENS = 8, 48


@pytest.mark.timeout(1800)
def test_exported_policy_answers_greedily_as_it_was_evaluated(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    learnt = [{"prompt": row["question"], "completion": row["answer"]} for row in SAMPLE[:16]]
    sizes = {"generation": {"max_model_len": 384, "max_new_tokens": NUM_TOKENS}}
    tuning = {"num_steps": 4, "batch_size": 4, "num_warmup_steps": 1}
    areal_flow.sft(model=str(model), rows=learnt, name="tuned", sft=tuning, **sizes)
    assert main(["export", "tuned", "exported"]) == 0

    prompts = [
        {"question": row["question"], "answer": row["answer"]} for row in SAMPLE[-NUM_PROMPTS:]
    ]
    evaluation = areal_flow.evaluate(
        "tuned", prompts=prompts, temperature=0, chat_template=True, rewards=["math"], **sizes
    )
    assert len(evaluation.answers) == NUM_PROMPTS

    policy = AutoModelForCausalLM.from_pretrained("exported", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained("exported")
    answers = {
        text: greedy(policy, tokenizer, text)
        for text in (
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row["question"]}],
                tokenize=False,
                add_generation_prompt=True,
            )
            for row in prompts
        )
    }
    assert {each["prompt"]: each["completion"] for each in evaluation.answers} == answers
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    assert any(greedy(base, tokenizer, text) != answer for text, answer in answers.items())


def greedy(policy: torch.nn.Module, tokenizer: object, text: str) -> str:
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    tokens = policy.generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False)
    return tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
