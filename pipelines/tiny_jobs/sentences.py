"""Sentences with given words, like IFEval's constraints, and their verifier.

question    "Write one sentence with the words lamp and river."
answer      ["lamp", "river"]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import Any

from areal_flow.config import Recipe

MIN_WORDS, MAX_WORDS = 6, 25
ECHOES = {"sentence", "word", "words"}
"""Words of the question: a sentence with one of them may repeat the question."""
_NOUNS = """
anchor apple arrow artist autumn banana basket beach bird blanket boat book bottle box bread bridge
brother bucket butter button cake camera candle captain car carpet castle cat chair cheese cherry
circle clock cloud coat coffee corner cow cup curtain desert desk doctor dog door dragon dress drum
engine farmer feather field finger fire fish flower forest fox garden gate ghost glacier glass goat
guitar hammer harbor hat hill honey horse house island jacket judge kitchen kite knife ladder lake
lamp leaf lemon letter library lion magnet map market mirror monkey moon mountain mouse museum music
needle nest newspaper night ocean onion orange owl painter palace paper parrot pencil piano picture
pillow pilot pirate planet pocket poet potato prince queen rabbit radio rain ring river road robot
rocket roof rope rose salt sand school scissors shadow sheep ship shoe shop shoulder singer sister
snow soldier song soup spider spoon star station stone storm street sugar summer sun table tailor
teacher tent ticket tiger tower train tree tunnel turtle umbrella uncle valley village violin wagon
wall watch water whale wheel window winter wolf
"""
NOUNS = _NOUNS.split()


def make_sentences(recipe: Recipe) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return training rows and held-out rows; no pair of words is in both."""
    pairs = [*combinations(NOUNS, 2)]
    Random(recipe.seed).shuffle(pairs)
    num_held_out, num_prompts = recipe.prompts.num_held_out, recipe.prompts.num_prompts
    rows = [
        {"question": f"Write one sentence with the words {a} and {b}.", "answer": [a, b]}
        for a, b in pairs[: num_held_out + num_prompts]
    ]
    return rows[num_held_out:], rows[:num_held_out]


def verify_sentence(completion: str, answer: Sequence[str]) -> float:
    """Return 1 for one sentence of `MIN_WORDS` to `MAX_WORDS` words with each given word once."""
    text = completion.strip()
    words = re.findall(r"[^\W\d_]+(?:['’-][^\W\d_]+)*", text.lower())
    is_sentence = re.fullmatch(r"[A-Z\"“][^.!?\n]*[.!?][\"”]?", text) is not None
    has_words = all(words.count(word) == 1 for word in answer)
    is_own = ECHOES.isdisjoint(words) and MIN_WORDS <= len(words) <= MAX_WORDS
    return float(is_sentence and has_words and is_own)
