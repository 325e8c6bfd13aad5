"""The recipe `smollm`: which sentences pass, and that no answer passes for every pair of words."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_flow.config import Recipe, load_recipe
from pipelines.jobs.job import recipe_path
from pipelines.tiny_jobs.sentences import make_sentences, verify_sentence

WORDS = ("lamp", "river")


def recipe() -> Recipe:
    return load_recipe(recipe_path(Path("smollm")), {"prompts": {"num_held_out": 200}})


@pytest.mark.parametrize(
    "completion",
    [
        "The lamp shone over the dark river.",
        " The lamp's light fell on a lamp by the river!\n",
        '"Where is the river," she asked the old lamp.',
        "Under the lamp, a river of well-dressed people went home…slowly, did they?",
    ],
)
def test_one_sentence_with_both_words_passes(completion: str) -> None:
    assert verify_sentence(completion, WORDS) == 1


@pytest.mark.parametrize(
    ("completion", "wrong"),
    [
        ("", "nothing"),
        ("Lamp and river.", "too short"),
        ("The lamp shone over the dark rivers.", "another word"),
        ("The lamp shone over the dark lake.", "a word is missing"),
        ("The lamp beside the lamp shone over the river.", "a word twice"),
        ("The lamp shone. The river was very dark.", "two sentences"),
        ("The lamp shone over the dark river", "no end"),
        ("the lamp shone over the dark river.", "a small letter"),
        ("Here it is:\nThe lamp shone over the dark river.", "two lines"),
        (f"The lamp {'really ' * 25}shone over the river.", "too long"),
        ("Write one sentence with the words lamp and river.", "the question"),
    ],
)
def test_other_sentences_fail(completion: str, wrong: str) -> None:
    assert verify_sentence(completion, WORDS) == 0, wrong


def test_constant_and_empty_answers_score_next_to_nothing() -> None:
    train, held_out = make_sentences(recipe())
    constant = "The old man walked to the house by the river with his dog."
    for answer in ("", constant):
        rate = sum(verify_sentence(answer, row["answer"]) for row in held_out) / len(held_out)
        assert rate < 0.01
    assert len(held_out) == 200
    assert len(train) == 8000
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
