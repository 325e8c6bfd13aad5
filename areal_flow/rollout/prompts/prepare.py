"""Writes a run's prompt tables in batches, so that memory does not grow with the file.

Bad rows abort the preparation, or are skipped and listed. Training and held-out prompts are
disjoint by text.
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
import pyarrow.parquet as pq

from areal_flow.core.digests import sha256_hex
from areal_flow.core.errors import PromptError
from areal_flow.core.layout import RunLayout
from areal_flow.core.pass_rates import HELD_OUT
from areal_flow.policy.tokenizer.directory import prompt_tokens, tokenizer_of
from areal_flow.rewards.code.rows import NoTests, code_task
from areal_flow.rewards.math.processes import MathPool
from areal_flow.rewards.math.reward import check_reference, number_in
from areal_flow.rewards.registry import reads_answer
from areal_flow.rollout.prompts.files import (
    Place,
    read_prompts,
    refuse_bad_rows,
    repeated_ids,
)
from areal_flow.rollout.prompts.formats import hub_dataset, read_rows
from areal_flow.rollout.prompts.rendering import Render, renderer, required_chat_template
from areal_flow.rollout.prompts.rows import (
    ANSWER_FIELDS,
    QUESTION_FIELDS,
    Row,
    answer_field,
    answer_of,
    columns_of,
    messages_in,
    question_field,
    question_of,
    usual_fields,
)
from areal_flow.rollout.prompts.settings import (
    DifficultySettings,
    HeldOutSettings,
    PromptPlan,
    PromptSettings,
    RowSettings,
    RowsSettings,
)
from areal_flow.rollout.prompts.table import QUOTAS, PromptTable, quotas
from schemas import PromptRow, arrow_schema, validate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROMPTS = arrow_schema(PromptRow)
BATCH_ROWS = 1024
NUM_FIELD_ROWS = 256
"""Rows that decide which fields hold questions and answers."""


@dataclass(frozen=True, slots=True)
class Prepared:
    num_train: int
    num_held_out: int
    num_repeated: int
    """Rows left out because their prompt is held out, too."""
    chosen: str
    """How many prompts an earlier run's pass rates keep; empty without such a run."""
    bad_rows: list[str]
    first_prompt: str
    """As the policy reads it, with special tokens."""
    chat_template_hash: str
    """SHA-256 of the chat template; empty without one."""
    by_source: Mapping[str, int] = field(default_factory=dict)
    """Number of training prompts of each of several sources."""
    cut_to: Mapping[str, int] = field(default_factory=dict)
    """Maximum number of held-out rows of files that are too small for `num_held_out`."""


def prepare_prompts(plan: PromptPlan, layout: RunLayout) -> Prepared:
    """Write the run's prompt tables; a prompt belongs to the first held-out set that has it.

    The pass rates of `prompts.difficulty.run` must be in the run directory already.
    """
    bad_rows: dict[Place, PromptError] = {}
    held_out: dict[str, Row] = {}
    num_repeated = 0
    num_by_source = Counter[str]()

    def is_new(row: Row) -> bool:
        nonlocal num_repeated
        num_repeated += row["prompt"] in held_out
        return row["prompt"] not in held_out

    is_chosen = DifficultyFilter(plan.rows.prompts.difficulty, layout.difficulty)

    def to_train(rows: Iterable[Row]) -> Iterator[Row]:
        for row in filter(is_chosen, filter(is_new, rows)):
            num_by_source[row["source"]] += 1
            yield row

    rest, cut_to = list[Iterator[Row]](), dict[str, int]()
    for name, source in plan.sources.items():
        read = _reader(plan, source, layout, bad_rows, source=name)
        candidates, remaining = _split(source.prompts, read, cut_to, source=name, seed=plan.seed)
        for row in filter(is_new, islice(candidates, source.prompts.num_held_out)):
            held_out[row["prompt"]] = row
        rest.append(remaining)
    for row in filter(is_new, _set_rows(plan, plan.held_out, layout, bad_rows)):
        held_out[row["prompt"]] = row
    num_held_out = _write(layout.held_out_prompts, held_out.values())
    shares = quotas(plan.shares)
    rows = to_train(chain.from_iterable(rest))
    num_train = _write(layout.train_prompts, rows, {QUOTAS: json.dumps(shares)})
    _refuse(bad_rows, plan, num_good=num_held_out + num_train)
    messages = [*map(str, bad_rows.values())]
    layout.bad_rows.write_text("".join(json.dumps(message) + "\n" for message in messages))
    for name in plan.sources:
        if not num_by_source[name]:
            of = f" of source {name!r}" if name else ""
            advice = f"{is_chosen}; widen prompts.difficulty, or " if is_chosen.counts else ""
            raise PromptError(
                f"no prompts{of} are left to train on; {advice}give more, or hold out fewer"
            )
    first_tokens = PromptTable(layout.train_prompts, seed=plan.seed).row(0).tokens.tolist()
    return Prepared(
        num_train,
        num_held_out,
        num_repeated,
        str(is_chosen),
        messages,
        first_prompt=tokenizer_of(layout.model).decode(first_tokens, skip_special_tokens=False),
        chat_template_hash=_record_chat_template(plan, layout),
        by_source={} if "" in plan.sources else dict(num_by_source),
        cut_to=cut_to,
    )


class DifficultyFilter:
    """Keeps prompts that are neither too easy nor too hard, by their pass rates in an earlier run.

    A prompt is identified by the hash of its text.
    """

    def __init__(self, settings: DifficultySettings, recorded: Path) -> None:
        """Read `recorded`, a Parquet file of the earlier run's pass rates, if a run is named."""
        self._settings = settings
        self.counts = Counter[str]()
        """How many prompts were `kept`, `too easy`, `too hard` and `unseen`."""
        rows = pq.read_table(recorded).to_pylist() if settings.run else []
        self._rates = {
            row["prompt_hash"]: row["pass_rate"]
            for row in rows
            if row["num_samples"] >= settings.min_samples
        }

    def __call__(self, row: dict[str, Any]) -> bool:
        settings = self._settings
        if not settings.run:
            return True
        rate = self._rates.get(sha256_hex(row["prompt"]))
        if rate is None:
            self.counts["unseen"] += 1
            return settings.keep_unseen
        minimum, maximum = settings.pass_rate_range
        easy, hard = rate > maximum, rate < minimum
        self.counts["too easy" if easy else "too hard" if hard else "kept"] += 1
        return not (easy or hard)

    def __str__(self) -> str:
        unseen = "kept, too" if self._settings.keep_unseen else "left out"
        counted = ", ".join(
            f"{self.counts[name]} {name}" for name in ("kept", "too easy", "too hard")
        )
        of = f"by the pass rates of run {self._settings.run}"
        return f"{of}: {counted}, {self.counts['unseen']} unseen ({unseen})" if self.counts else ""


def chosen_fields(
    path: Path | None,
    own: PromptSettings | RowsSettings,
    shared: PromptSettings | None = None,
) -> tuple[dict[str, str], str]:
    """Return the fields of a file that settings leave open, and a note unless both are as usual.

    Args:
        path: the file, which may be missing: that is an error of its preparation.
        own: settings of this file.
        shared: settings that hold where the file has such fields and `own` names none.
    """
    if path is None or (own.question_field and own.answer_field):
        return {}, ""
    good = read_prompts(path, lambda row: row, on_bad=lambda place, error: None)
    try:
        rows = [*islice(good, NUM_FIELD_ROWS)]
    except PromptError:
        return {}, ""
    chosen, descriptions, is_usual = {}, [], True
    usual_names = {"question_field": QUESTION_FIELDS, "answer_field": ANSWER_FIELDS}
    for name, usual in usual_names.items():
        inherited = getattr(shared, name, None)
        names = dict.fromkeys(filter(None, (inherited, *usual)))
        present = usual_fields(rows, [*names])
        if getattr(own, name) or (present and present[0] == inherited):
            continue
        if present:
            chosen[name] = present[0]
        is_usual &= present == [usual[0]]
        ignored = f" (ignored: {', '.join(present[1:])})" if present[1:] else ""
        descriptions.append(f'{name} = "{present[0]}"{ignored}' if present else f"no {name}")
    return chosen, "" if is_usual else f"Fields of {path.name}: {', '.join(descriptions)}"


def check_first_rows(
    plan: PromptPlan, rewards: Path, *, held_out: Collection[str] | None = None
) -> None:
    """Refuse files that are empty or start with bad rows, before a model is read.

    Datasets of the hub are not fetched yet.

    Args:
        plan: names the files.
        rewards: the directory of shipped rewards.
        held_out: check these held-out sets alone; None: all files.
    """
    sets = None if held_out is None else plan.only(held_out)
    files = plan.files() if sets is None else [(each.path, rows) for each, rows in sets]
    bad_rows: dict[Place, PromptError] = {}
    num_good = 0
    for path, rows in files:
        if hub_dataset(path):
            continue
        needed = _needs_answer(rows, rewards)
        check = partial(_check_row, settings=rows.prompts, needs_answer=needed)
        good = read_prompts(path, check, on_bad=bad_rows.__setitem__)
        num_good += sum(1 for _ in islice(good, BATCH_ROWS))
    _refuse(bad_rows, plan, num_good=num_good)


def _needs_answer(rows: RowSettings, rewards: Path) -> bool:
    return any(reads_answer(name, rewards) for name in rows.verifiers)


def _check_row(row: Row, settings: PromptSettings, *, needs_answer: bool) -> None:
    columns_of(row, settings, needs_answer=needs_answer)
    if not messages_in(row, question_field(row, settings)):
        question_of(row, settings)


Read = Callable[..., Iterator[Row]]


def _split(
    settings: PromptSettings, read: Read, cut_to: dict[str, int], *, source: str, seed: int
) -> tuple[Iterator[Row], Iterator[Row]]:
    """Return the rows that may be held out, at most a fifth of a file, and the remaining ones."""
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
    """Write the held-out table, with the sets of `evaluation.held_out` that have these names."""
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
    """Return a function that reads a file; row ids are unique within the group `ids_of`."""
    make = partial(
        _prompt_row,
        source=source,
        plan=plan,
        rows=rows,
        needs_answer=_needs_answer(rows, layout.rewards),
        render=renderer(plan, rows.prompts, layout.model, functions=layout.rewards),
        tokenizer=tokenizer_of(layout.model),
        algebra=MathPool(1),
    )
    refused = cache(repeated_ids)

    def read(path: Path, *, ids_of: str = source, **options: Any) -> Iterator[Row]:
        return read_prompts(
            path,
            partial(make, ids_of=ids_of),
            on_bad=bad_rows.__setitem__,
            refused=refused(path),
            **options,
        )

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
    needs_answer: bool,
    render: Render,
    tokenizer: Tokenizer,
    algebra: MathPool,
) -> Row:
    settings, verifiers = rows.prompts, rows.verifiers
    columns = columns_of(row, settings, needs_answer=needs_answer)
    answer = answer_of(row, settings, needs_answer=needs_answer)
    if "numeric" in verifiers and number_in(answer) is None:
        raise ValueError(
            f"field {answer_field(row, settings)!r}: the numeric verifier expected a single "
            f"number, got {columns['answer'][-40:]!r}"
        )
    if "math" in verifiers:
        check_reference(algebra, answer)
    if "code" in verifiers:
        try:
            code_task({"prompt": "", **json.loads(columns["metadata"])}, "pass")
        except NoTests as error:
            raise ValueError(f"the verifier 'code': {error}") from None
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
    # Equal texts with different answers or columns are different prompts.
    row_id = columns["prompt_id"] or sha256_hex(text + columns["metadata"], 16)
    prompt_id = f"{ids_of}/{row_id}" if ids_of else row_id
    rendered = {"prompt_id": prompt_id, "source": source, "prompt": text, "prompt_tokens": tokens}
    return {**columns, **rendered}


def _record_chat_template(plan: PromptPlan, layout: RunLayout) -> str:
    if (chat := required_chat_template(plan, plan.rows.prompts, layout.model)) is None:
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
