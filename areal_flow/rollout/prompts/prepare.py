"""Makes a run's tables of prompts, in batches, so that memory does not grow with the file.

Bad rows end the preparation, or are skipped and listed. The prompts to train on and those held out
are disjoint by text.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from areal_flow.core.digests import sha256_hex
from areal_flow.core.errors import PromptError
from areal_flow.core.layout import RunLayout
from areal_flow.core.pass_rates import HELD_OUT
from areal_flow.policy.tokenizer.directory import prompt_tokens, tokenizer_of
from areal_flow.rewards.code.rows import NoTests, code_task
from areal_flow.rewards.math.processes import MathPool
from areal_flow.rewards.math.reward import check_reference
from areal_flow.rewards.numeric import number_in
from areal_flow.rollout.prompts.difficulty import DifficultyFilter
from areal_flow.rollout.prompts.files import (
    Place,
    read_prompts,
    read_rows,
    refuse_bad_rows,
    repeated_ids,
)
from areal_flow.rollout.prompts.plan import PromptPlan, RowSettings
from areal_flow.rollout.prompts.rendering import Render, renderer, required_chat_template
from areal_flow.rollout.prompts.rows import Row, answer_of, columns_of, messages_in, question_of
from areal_flow.rollout.prompts.settings import HeldOutSettings, PromptSettings
from areal_flow.rollout.prompts.table import QUOTAS, PromptTable, quotas
from schemas import PromptRow, arrow_schema, validate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROMPTS = arrow_schema(PromptRow)
BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True)
class Prepared:
    num_train: int
    num_held_out: int
    num_repeated: int
    """Rows that ask what is held out: they are left out."""
    chosen: str
    """How many prompts an earlier run's pass rates keep; empty where they are not asked."""
    bad_rows: list[str]
    first_prompt: str
    """As the policy reads it: special tokens are there."""
    chat_template_hash: str
    """SHA-256 of the chat template; empty without one."""
    by_source: Mapping[str, int] = field(default_factory=dict)
    """How many prompts to train on there are of each of several sources."""
    cut_to: Mapping[str, int] = field(default_factory=dict)
    """How many rows at most are held out of files that are too small for `num_held_out`."""


def prepare_prompts(plan: PromptPlan, layout: RunLayout) -> Prepared:
    """Write the run's prompt tables; a prompt belongs to the first held-out set that has it.

    The pass rates of `prompts.difficulty.run` are recorded by then (`store.pass_rates`).
    """
    bad_rows: dict[Place, PromptError] = {}
    held_out: dict[str, Row] = {}
    num_repeated = 0
    of_source = Counter[str]()

    def is_new(row: Row) -> bool:
        nonlocal num_repeated
        num_repeated += row["prompt"] in held_out
        return row["prompt"] not in held_out

    is_chosen = DifficultyFilter(plan.rows.prompts.difficulty, layout.difficulty)

    def to_train(rows: Iterable[Row]) -> Iterator[Row]:
        for row in filter(is_chosen, filter(is_new, rows)):
            of_source[row["source"]] += 1
            yield row

    rest, cut_to = list[Iterator[Row]](), dict[str, int]()
    for name, part in plan.sources.items():
        read = _reader(plan, part, layout, bad_rows, source=name)
        candidates, others = _split(part.prompts, read, cut_to, source=name, seed=plan.seed)
        for row in filter(is_new, islice(candidates, part.prompts.num_held_out)):
            held_out[row["prompt"]] = row
        rest.append(others)
    for row in filter(is_new, _set_rows(plan, plan.held_out, layout, bad_rows)):
        held_out[row["prompt"]] = row
    num_held_out = _write(layout.held_out_prompts, held_out.values())
    shares = quotas(plan.shares)
    rows = to_train(chain.from_iterable(rest))
    num_train = _write(layout.train_prompts, rows, {QUOTAS: json.dumps(shares)})
    _refuse(bad_rows, plan, num_good=num_held_out + num_train)
    listed = [*map(str, bad_rows.values())]
    layout.bad_rows.write_text("".join(json.dumps(row) + "\n" for row in listed))
    _refuse_empty_sources(plan, of_source, is_chosen)
    return Prepared(
        num_train,
        num_held_out,
        num_repeated,
        str(is_chosen),
        listed,
        first_prompt=_first_prompt(plan.seed, layout),
        chat_template_hash=_record_chat_template(plan, layout),
        by_source={} if "" in plan.sources else dict(of_source),
        cut_to=cut_to,
    )


def _first_prompt(seed: int, layout: RunLayout) -> str:
    first = PromptTable(layout.train_prompts, seed=seed).row(0).tokens.tolist()
    return tokenizer_of(layout.model).decode(first, skip_special_tokens=False)


def _refuse_empty_sources(
    plan: PromptPlan, num_prompts: Mapping[str, int], is_chosen: DifficultyFilter
) -> None:
    for name in plan.sources:
        if not num_prompts[name]:
            of = f" of source {name!r}" if name else ""
            advice = f"{is_chosen}; widen prompts.difficulty, or " if is_chosen.counts else ""
            raise PromptError(
                f"no prompts{of} are left to train on; {advice}give more, or hold out fewer"
            )


def check_first_rows(plan: PromptPlan) -> None:
    """Refuse files that are empty or have bad rows at first, before a model is read."""
    _check_files(plan.files(), plan)


def check_first_held_out_rows(plan: PromptPlan, *, names: Collection[str]) -> None:
    _check_files([(each.path, rows) for each, rows in plan.only(names)], plan)


def _check_files(files: Iterable[tuple[Path, RowSettings]], plan: PromptPlan) -> None:
    bad_rows: dict[Place, PromptError] = {}
    num_good = 0
    for path, of in files:
        check = partial(_check_row, settings=of.prompts, needs_answer=bool(of.verifiers))
        rows = read_prompts(path, check, on_bad=bad_rows.__setitem__)
        num_good += sum(1 for _ in islice(rows, BATCH_ROWS))
    _refuse(bad_rows, plan, num_good=num_good)


def _check_row(row: Row, settings: PromptSettings, *, needs_answer: bool) -> None:
    columns_of(row, settings, needs_answer=needs_answer)
    if not messages_in(row, settings.question_field):
        question_of(row, settings)


Read = Callable[..., Iterator[Row]]


def _split(
    settings: PromptSettings, read: Read, cut_to: dict[str, int], *, source: str, seed: int
) -> tuple[Iterator[Row], Iterator[Row]]:
    """Return rows that may be held out, at most a fifth of a file, and the others."""
    path = settings.path
    assert path is not None
    if settings.held_out_path is not None:
        held_out = "/".join(filter(None, (source, HELD_OUT)))
        return read(settings.held_out_path, ids_of=held_out), read(path)
    num_rows = sum(1 for _ in read_rows(path))
    num_candidates = min(settings.num_held_out, num_rows // 5)
    if num_candidates < settings.num_held_out:
        cut_to[str(path)] = num_candidates
    places = set(random.Random(seed).sample(range(num_rows), num_candidates))
    rest = read(path, keeps=lambda place: place not in places)
    return read(path, keeps=places.__contains__), rest


def prepare_held_out(plan: PromptPlan, layout: RunLayout, *, names: Collection[str]) -> None:
    """Write the sets of `evaluation.held_out` that have these names as the held-out table."""
    bad_rows: dict[Place, PromptError] = {}
    rows = _set_rows(plan, plan.only(names), layout, bad_rows)
    _refuse(bad_rows, plan, num_good=_write(layout.held_out_prompts, rows))


def _set_rows(
    plan: PromptPlan,
    sets: Iterable[tuple[HeldOutSettings, RowSettings]],
    layout: RunLayout,
    bad_rows: dict[Place, PromptError],
) -> Iterator[Row]:
    for each, rows in sets:
        read = _reader(plan, rows, layout, bad_rows, source=each.name)
        yield from islice(read(each.path), each.num_prompts or None)


def _reader(
    plan: PromptPlan,
    rows: RowSettings,
    layout: RunLayout,
    bad_rows: dict[Place, PromptError],
    *,
    source: str = "",
) -> Read:
    """Return what reads a file's rows; `ids_of` names the rows among which an id is unique."""
    make = partial(
        _prompt_row,
        source=source,
        plan=plan,
        rows=rows,
        render=renderer(plan, rows.prompts, layout.model),
        tokenizer=tokenizer_of(layout.model),
        algebra=MathPool(1),
    )
    refused = cache(repeated_ids)

    def read(path: Path, *, ids_of: str = source, **keeps: Any) -> Iterator[Row]:
        made = partial(make, ids_of=ids_of)
        on_bad = bad_rows.__setitem__
        return read_prompts(path, made, on_bad=on_bad, refused=refused(path), **keeps)

    return read


def _refuse(bad_rows: dict[Place, PromptError], plan: PromptPlan, *, num_good: int) -> None:
    skip = ", or set prompts.skip_bad_rows (--skip-bad-rows)"
    check = "; no row is good: prompts.question_field and prompts.answer_field name their fields"
    if not plan.rows.prompts.skip_bad_rows:
        refuse_bad_rows(bad_rows, advice=skip if num_good else check)


def _prompt_row(
    row: Row,
    *,
    source: str,
    ids_of: str,
    plan: PromptPlan,
    rows: RowSettings,
    render: Render,
    tokenizer: Tokenizer,
    algebra: MathPool,
) -> Row:
    settings, verifiers = rows.prompts, rows.verifiers
    needs_answer = bool(verifiers)
    columns = columns_of(row, settings, needs_answer=needs_answer)
    answer = answer_of(row, settings, needs_answer=needs_answer)
    if "numeric" in verifiers and number_in(answer) is None:
        raise ValueError(
            f"field {settings.answer_field!r}: the numeric verifier expected a single number, "
            f"got {columns['answer'][-40:]!r}"
        )
    if "math" in verifiers:
        check_reference(algebra, answer)
    if "code" in verifiers:
        _check_tests(columns)
    text = render(question_of(row, settings))
    if settings.chat_template:  # which writes the special tokens itself
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
    else:
        tokens = prompt_tokens(tokenizer, text)
    room = plan.max_model_len - plan.max_new_tokens
    if not 0 < len(tokens) <= room:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens, expected 1 to {room}: generation.max_model_len "
            f"({plan.max_model_len}) minus max_new_tokens ({plan.max_new_tokens})"
        )
    # Equal texts with other answers or columns are other prompts.
    own_id = columns["prompt_id"] or sha256_hex(text + columns["metadata"], 16)
    prompt_id = f"{ids_of}/{own_id}" if ids_of else own_id
    made = {"prompt_id": prompt_id, "source": source, "prompt": text, "prompt_tokens": tokens}
    return {**columns, **made}


def _check_tests(columns: Row) -> None:
    try:
        code_task({"prompt": "", **json.loads(columns["metadata"])}, "pass")
    except NoTests as error:
        raise ValueError(f"the verifier 'code': {error}") from None


def _record_chat_template(plan: PromptPlan, layout: RunLayout) -> str:
    if (chat := required_chat_template(plan, layout.model)) is None:
        return ""
    record = {"sha256": chat.sha256, "template": chat.source}
    layout.chat_template.write_text(json.dumps(record, indent=2) + "\n")
    return chat.sha256


def _write(path: Path, rows: Iterable[Row], metadata: Mapping[bytes, str] | None = None) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    num_rows, remaining = 0, iter(rows)
    schema = PROMPTS.with_metadata(dict(metadata or {}))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        while batch := [*islice(remaining, BATCH_ROWS)]:
            checked = validate(pa.Table.from_pylist(batch, schema=PROMPTS), PromptRow)
            writer.write_table(checked.replace_schema_metadata(schema.metadata))
            num_rows += len(batch)
    return num_rows
