"""The tokenizer that `transformers` makes of a model's directory, and its chat template.

For some architectures, Qwen2 among them, `AutoTokenizer` makes another kind of tokenizer than
tokenizer.json describes. A run tokenises as `AutoTokenizer` does, since users of the exported model
do. The run's own tokenizer.json holds the result, so that no worker needs `transformers` for it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_flow.core.errors import ModelError
from areal_flow.policy.tokenizer.chat import Message, Tool, tool_schema
from areal_flow.policy.tokenizer.directory import chat_template_of, tokenizer_of, vocab_size_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

logger = logging.getLogger(__name__)

NUM_COMPARED = 20
"""Number of texts that are tokenised in both ways, to see whether these differ."""
_SHOWN_TOKENS = 12
_QUESTION: Message = {"role": "user", "content": "1 + 1 ="}
_SYSTEM: Message = {"role": "system", "content": "Be brief."}
_ANSWER: Message = {"role": "assistant", "content": "2"}
_PROBES: tuple[tuple[list[Message], list[Tool]], ...] = (
    ([_QUESTION], []),
    ([_SYSTEM, _QUESTION], []),
    ([_QUESTION, _ANSWER, _QUESTION], []),
    ([_QUESTION], [tool_schema("add", "Add numbers.")]),
)
"""Messages, and the tools that the prompt describes."""


def auto_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer that `AutoTokenizer` makes, without padding and truncation.

    Tokens that it adds beyond the model's embedding are left out, such as `<|endoftext|>` of a
    Qwen2 that has none.
    """
    return _backend_of(_loaded(directory), directory)


def write_tokenizer(source: Path, target: Path) -> None:
    loaded = _loaded(source)
    _compare_chat_template(loaded, source)
    tokenizer, file = _backend_of(loaded, source), target / "tokenizer.json"
    if tokenizer.to_str() == tokenizer_of(target).to_str():
        return
    tokenizer.save(str(file))
    if auto_tokenizer(target).to_str() != tokenizer.to_str():
        raise ModelError(
            f"{source}: AutoTokenizer makes another tokenizer of the files that it wrote itself, "
            "so that the exported model would be tokenised otherwise than the trained one: save "
            "the tokenizer with save_pretrained of this version of transformers"
        )


def warn_of_other_tokens(source: Path, target: Path, texts: Sequence[str]) -> None:
    """Warn where a model's own tokenizer.json makes other tokens than `AutoTokenizer`."""
    compared = texts[:NUM_COMPARED]
    original, used = (
        [tokenizer_of(directory).encode(text).tokens for text in compared]
        for directory in (source, target)
    )
    differing = [i for i in range(len(compared)) if original[i] != used[i]]
    if not differing:
        return
    first = differing[0]
    pairs = zip(original[first], used[first], strict=False)
    num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    begin = max(0, num_equal - 2)
    shown = slice(begin, begin + _SHOWN_TOKENS)
    logger.warning(
        f"{source}: AutoTokenizer tokenises {len(differing)} of the first {len(compared)} texts "
        "otherwise than tokenizer.json says. The run uses AutoTokenizer's tokens, as users of the "
        f"exported model do. In {compared[first][:80]!r}, from token {begin}:\n"
        f"  tokenizer.json: {original[first][shown]}\n  AutoTokenizer:  {used[first][shown]}\n"
        "If the model was trained with tokenizer.json as it is, its answers suffer: ask its makers "
        "for a tokenizer that AutoTokenizer loads as they meant it"
    )


def _loaded(directory: Path) -> Any:
    from areal_flow.policy.models.huggingface import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # a tokenizer's class can fail in any way
        raise ModelError(
            f"{directory}: AutoTokenizer cannot load the tokenizer: {type(error).__name__}: {error}"
        ) from error


def _backend_of(loaded: Any, directory: Path) -> Tokenizer:
    tokenizer: Tokenizer | None = getattr(loaded, "backend_tokenizer", None)
    if tokenizer is None:
        raise ModelError(
            f"{loaded.name_or_path}: expected a fast tokenizer, found {type(loaded).__name__}: "
            "save one beside the model with save_pretrained"
        )
    tokenizer.no_padding()
    tokenizer.no_truncation()
    vocab_size = vocab_size_of(directory)
    if vocab_size is None or max(tokenizer.get_vocab().values(), default=0) < vocab_size:
        return tokenizer
    description = json.loads(tokenizer.to_str())
    added = description["added_tokens"]
    description["added_tokens"] = [token for token in added if token["id"] < vocab_size]
    return type(tokenizer).from_str(json.dumps(description))


def _compare_chat_template(loaded: Any, directory: Path) -> None:
    template = chat_template_of(directory)
    if template is None:
        return
    for messages, tools in _PROBES:
        try:
            rendered = template.render(messages, tools=tools)
        except ValueError:  # refused if a run needs it
            continue
        expected = loaded.apply_chat_template(
            messages, tools=tools or None, tokenize=False, add_generation_prompt=True
        )
        if rendered != expected:
            raise ModelError(
                f"{directory}: expected the chat template to render as apply_chat_template does, "
                f"{expected!r}, found {rendered!r}: write the special tokens that it names into "
                "tokenizer_config.json"
            )
