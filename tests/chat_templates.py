"""Chat templates of common models, and tokenizers with their special tokens."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer

from pipelines.tiny_jobs.tiny_policy import END

_TURNS = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ CONTENT }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML = _TURNS.replace("CONTENT", "message.content")
FORGETS_REASONING = _TURNS.replace("CONTENT", "message.content.split('</think>')[-1].lstrip()")
"""As Qwen3's: what an answer thought is not shown in later turns."""
HERMES = (
    "{% if tools %}<|im_start|>system\n# Tools\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>"
    "{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{% if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{% else %}{{ message.content }}{% endif %}{% for call in message.tool_calls or [] %}"
    "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen2.5's: tools in a system message, calls as JSON, their answers in a user's turn."""
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}<|start|>{{ message.role }}<|end|>\n\n"
    "{{ message.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|end|>\n\n{% endif %}"
)
LLAMA_2 = (
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% elif message.role == 'user' %}"
    "{{ bos_token }}[INST] {{ message.content }} [/INST]"
    "{% else %} {{ message.content | trim }} <|im_end|>{% endif %}{% endfor %}"
)
MARKS = {"eos_token": "<|im_end|>", "bos_token": "<s>"}


def give_chat_template(model: Path, template: str) -> None:
    """Give a directory with the tiny tokenizer a chat template and its special tokens.

    The vocabulary stays as long as it was: two of its tokens become the marks.
    """
    description = json.loads((model / "tokenizer.json").read_text())
    text = json.dumps(description)
    renamed = {f'"{END}"': '"<|im_end|>"', '"<pad>"': '"<s>"'}
    for old, new in renamed.items():
        text = text.replace(old, new)
    (model / "tokenizer.json").write_text(text)
    Tokenizer.from_file(str(model / "tokenizer.json"))
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings |= {**MARKS, "pad_token": "<s>", "chat_template": template}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
