"""The inputs of a run beside its recipe: recorded once prepared, compared at each resume.

A run reads its own copies of prompts, fine-tuning rows, configuration and tokenizer, and refuses
changed ones. The files that they were copied from may change. The model directory must not change
until version 0 is made from it, that of a reference never. A verifier is not copied, because its
code may import anything: a changed one is refused, or accepted for what follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path

from areal_flow.config import Recipe
from areal_flow.core.digests import file_hash
from areal_flow.core.durable import replace_file
from areal_flow.core.errors import RewardError, RunError
from areal_flow.core.layout import RunLayout
from areal_flow.core.lease import Writer
from areal_flow.log.directory import find_run
from areal_flow.policy.checkpoints import list_checkpoints

FIRST_EPOCH = 1
ACCEPT = (
    "restore it, or go on with --accept-verifier: ledger, lineage and evaluations then say which "
    "one scored what, and the summary compares nothing across the change"
)


@dataclass(frozen=True, slots=True)
class Verifier:
    identity: str = ""
    files: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunInputs:
    verifiers: Sequence[tuple[int, str]]
    """The identity of the first, then of each that was accepted, after its first writer epoch."""
    files: Mapping[str, str]
    """What the run reads, by path in its directory."""
    model: Mapping[str, str]
    """The model directory's files, of which version 0 is made; none if the model is made here."""
    sources: Mapping[str, str]
    """Files that the run has copies of."""
    reference: Mapping[str, str] = field(default_factory=dict)
    """The files of the model directory that is the reference; none if it is the first policy."""

    @property
    def verifier(self) -> str:
        return self.verifiers[-1][1]


def record_inputs(
    layout: RunLayout,
    recipe: Recipe,
    *,
    verifier: Verifier,
    model: Path,
    reference: Path | None = None,
) -> None:
    prompts = (layout.train_prompts, layout.held_out_prompts, layout.difficulty)
    copies = (*prompts, layout.sft_rows)
    held_out = (recipe.prompts.held_out_path, *(each.path for each in recipe.evaluation.held_out))
    earlier = recipe.prompts.difficulty.run
    chosen_by = find_run(layout.root.parent, earlier).identity if earlier else None
    several = (path for of in recipe.sources for path in (of.path, of.held_out_path))
    sources = (recipe.prompts.path, *held_out, *several, recipe.sft.path, chosen_by)
    inputs = RunInputs(
        verifiers=[(FIRST_EPOCH, verifier.identity)],
        files={
            path.relative_to(layout.root).as_posix(): file_hash(path)
            for path in (*copies, *sorted(layout.model.iterdir()))
            if path.is_file()
        },
        model=_hashes(model.resolve().iterdir()) if model != layout.model else {},
        sources=_hashes(chain.from_iterable(_files_of(path) for path in sources if path)),
        reference=_hashes(reference.resolve().iterdir()) if reference else {},
    )
    _write(layout, inputs)


def read_inputs(layout: RunLayout) -> RunInputs:
    try:
        record = json.loads(layout.inputs.read_text())
        named = [(int(epoch), str(verifier)) for epoch, verifier in record["verifiers"]]
        return RunInputs(**{**record, "verifiers": named})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise RunError(
            f"expected {layout.inputs}, which says what run {layout.name} is made of: {error}. "
            "Restore it from a copy"
        ) from None


def reference_directory(layout: RunLayout) -> Path | None:
    recorded = read_inputs(layout).reference if layout.inputs.is_file() else {}
    if changed := [*_changes(recorded)]:
        raise RunError(f"the reference of run {layout.name} changed, restore it: {changed[0]}")
    return next((Path(name).parent for name in recorded), None)


def check_inputs(layout: RunLayout, verifier: Verifier, *, accept_verifier: bool) -> list[str]:
    """Refuse changed inputs; return notes on changes that do not matter."""
    recorded = read_inputs(layout)
    changed = [*changed_files(layout, recorded)]
    changed += [
        f"{change}; restore it: the loss reads it" for change in _changes(recorded.reference)
    ]
    if not list_checkpoints(layout.checkpoints):
        advice = "version 0 is not made yet: restore it, or start a new run"
        changed += [f"{change}; {advice}" for change in _changes(recorded.model)]
    if verifier.identity != recorded.verifier and not accept_verifier:
        where = f" in {', '.join(verifier.files)}" if verifier.files else ""
        changed.append(
            f"the verifier: expected {recorded.verifier}, found {verifier.identity}{where}; "
            f"{ACCEPT}"
        )
    if changed:
        listed = "\n  ".join(changed)
        raise RunError(f"run {layout.name} cannot resume: its inputs changed\n  {listed}")
    return [
        f"{path} changed since run {layout.name} was prepared; the run goes on with its own copy"
        for path, recorded_hash in recorded.sources.items()
        if Path(path).is_file() and file_hash(Path(path)) != recorded_hash
    ]


def changed_files(layout: RunLayout, recorded: RunInputs) -> Iterator[str]:
    files = {str(layout.root / name): content for name, content in recorded.files.items()}
    yield from (f"{change}; restore it from a copy" for change in _changes(files))


def accept(layout: RunLayout, verifier: Verifier, writer: Writer) -> None:
    """Record the verifier of what this driver and later ones write."""
    recorded = read_inputs(layout)
    if verifier.identity != recorded.verifier:
        named = [*recorded.verifiers, (writer.writer_epoch, verifier.identity)]
        _write(layout, replace(recorded, verifiers=named))


def check_verifier(layout: RunLayout, identity: str) -> None:
    """Refuse code that was edited while the run goes on; outside a run any is accepted."""
    if layout.inputs.is_file() and identity != (current := read_inputs(layout).verifier):
        raise RewardError(
            f"expected the verifier {current}, found {identity} while run {layout.name} goes on: "
            "restore it, or stop the run and resume it with --accept-verifier"
        )


def _files_of(path: Path) -> Iterator[Path]:
    """Yield a file, or the files of a folder such as a Lance dataset."""
    yield from path.resolve().rglob("*") if path.is_dir() else [path.resolve()]


def _hashes(paths: Iterable[Path]) -> dict[str, str]:
    return {str(path): file_hash(path) for path in sorted(paths) if path.is_file()}


def _changes(recorded: Mapping[str, str]) -> Iterator[str]:
    for name, recorded_hash in recorded.items():
        current = file_hash(Path(name)) if Path(name).is_file() else "no such file"
        if current != recorded_hash:
            yield f"{name}: expected the content {recorded_hash}, found {current}"


def _write(layout: RunLayout, inputs: RunInputs) -> None:
    replace_file(layout.inputs, json.dumps(asdict(inputs), indent=2) + "\n")
