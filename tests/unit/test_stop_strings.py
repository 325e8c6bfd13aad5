"""Stop strings are detected in the text of a completion, however it is tokenised."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteFallback, ByteLevel, Fuse, Replace, Sequence, Strip
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel as Bytes

from areal_flow.core.errors import EngineError
from areal_flow.core.types import GroupRequest, Sampling, as_tokens
from areal_flow.rollout.engines.scheduler import SlotScheduler, StopStringSearch
from tests.engines import letters

MERGED = ("ab", "##")


def bytes_tokenizer() -> Tokenizer:
    """Return a tokenizer with a token for each byte, two longer ones and one special one."""
    symbols = [*sorted(Bytes.alphabet()), *MERGED]
    merges = [(merged[0], merged[1]) for merged in MERGED]
    tokenizer = Tokenizer(BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = Bytes(add_prefix_space=False), ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return tokenizer


def search_for(
    tokenizer: Tokenizer, *strings: str, prompt: str = "a", min_tokens: int = 0
) -> StopStringSearch:
    sampling = Sampling(64, stop_strings=strings, min_new_tokens=min_tokens)
    tokens = as_tokens(tokenizer.encode(prompt).ids)
    return StopStringSearch(tokenizer, GroupRequest("r", tokens, (1,), sampling))


def end_of(tokenizer: Tokenizer, text: str, *strings: str, min_tokens: int = 0) -> int | None:
    """Return the number of tokens after which a text's completion ends."""
    search = search_for(tokenizer, *strings, min_tokens=min_tokens)
    tokens = tokenizer.encode(text).ids
    return next((n for n, token in enumerate(tokens, 1) if search.ends_with(token)), None)


@pytest.mark.parametrize(
    ("text", "strings", "end"),
    [
        ("xab#", ("ab",), 2),
        ("xab#", ("b#",), 3),
        ("xab#", ("xa",), 2),
        ("x##4", ("#",), 2),
        ("x## 4", ("####", "## 4"), 4),
        ("x##", ("####",), None),
        ("caf\u00e9.", ("\u00e9",), 5),
        ("caf\u00e9.", ("f\u00e9.",), 6),
        ("x<end>y", ("<end>",), 2),
        ("x<end>y", ("x<end>y",), 3),
        ("bcd", ("abc",), None),
    ],
)
def test_stop_string_is_detected_at_the_token_that_completes_it(
    text: str, strings: tuple[str, ...], end: int | None
) -> None:
    """Across tokens and within one, of characters of two bytes, of special tokens; and never with
    the end of the prompt, which is an `a`."""
    assert end_of(bytes_tokenizer(), text, *strings) == end


def test_search_equals_one_in_the_whole_text() -> None:
    rng, tokenizer = random.Random(0), bytes_tokenizer()
    for _ in range(300):
        text = "".join(rng.choices("ab#\u00e9", k=30))
        strings = tuple("".join(rng.choices("ab#\u00e9", k=rng.randint(1, 5))) for _ in range(2))
        min_tokens = rng.randrange(12)
        tokens = tokenizer.encode(text).ids
        texts = [tokenizer.decode(tokens[:n]) for n in range(len(tokens) + 1)]
        expected = next(
            (
                n
                for n in range(min_tokens + 1, len(tokens) + 1)
                if any(
                    texts[n].rfind(s) + len(s) > len(texts[n - 1].rstrip("\ufffd"))
                    for s in strings
                    if s in texts[n]
                )
            ),
            None,
        )
        assert end_of(tokenizer, text, *strings, min_tokens=min_tokens) == expected


def test_bytes_that_are_no_character_end_nothing() -> None:
    """A search that raised would end the engine."""
    symbols = [*(f"<0x{byte:02X}>" for byte in range(256)), "b"]
    model = BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=[], byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.decoder = Sequence([Replace("_", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)])
    rng = random.Random(0)
    for _ in range(100):
        search = search_for(tokenizer, "bbb", prompt="b")
        assert not any(search.ends_with(rng.randrange(128, 256)) for _ in range(30))
        assert any(search.ends_with(256) for _ in range(4))


def test_request_with_stop_strings_needs_a_tokenizer() -> None:
    request = GroupRequest("r", as_tokens([1]), (1,), Sampling(4, stop_strings=("x",)))
    with pytest.raises(EngineError, match="no tokenizer"):
        SlotScheduler(1).add(request)
    SlotScheduler(1, letters()).add(request)
