"""Mutation testing of the pure core: reports the mutants that no unit test kills.

    python -m tests.mutation.mutate [--size 150] [--again] [--results FILE]

Each mutant runs in a process of its own, forked from one that has imported the libraries and
nothing of this project; its tests get it through the import system, and no file is changed. The
sample is the mutants with the smallest hashes: code that did not change keeps its mutants.
Survivors are explained in `survivors.toml`.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
import tomllib
from collections import Counter
from dataclasses import asdict
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

from tests.mutation.mutants import Mutant, mutants_of

HERE = Path(__file__).parent
LIBRARIES = (
    *("distributed", "hypothesis.strategies", "lance", "pandera.polars", "pytest", "tomlkit"),
    "transformers.models.qwen2.modeling_qwen2",
)
MIN_KILLED = 0.95
MEMORY_BYTES = 8 << 30


class MutatedModule(SourceFileLoader, MetaPathFinder):
    """Replaces the source of one module at import."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.file.removesuffix(".py").replace("/", "."), mutant.file)
        self._source = mutant.source

    def find_spec(self, fullname: str, *_: Any) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        return spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self.path, "exec")


def run_tests(mutant: Mutant, tests: list[str], *, limit_s: float) -> str:
    """Return "killed", "survived" or "timeout"."""
    process = multiprocessing.get_context("fork").Process(target=_in_child, args=(mutant, tests))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
        return "timeout"
    if process.exitcode in (3, 4, 5):
        raise SystemExit(f"expected tests that can run, pytest found none or failed on {tests}")
    return "killed" if process.exitcode else "survived"


def _in_child(mutant: Mutant, tests: list[str]) -> None:
    import pytest

    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    sys.meta_path.insert(0, MutatedModule(mutant))
    os._exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))


def tests_by_file() -> dict[str, list[str]]:
    """Return the tests of each mutated file; a later pattern of the table wins."""
    tests_of: dict[str, list[str]] = {}
    for pattern, tests in tomllib.loads((HERE / "tests_of_modules.toml").read_text()).items():
        files = sorted(str(file) for file in Path().glob(pattern))
        absent = [test for test in tests if not Path(test).exists()]
        if absent or not files:
            raise SystemExit(f"expected files at {pattern} and their tests, not found: {absent}")
        tests_of |= dict.fromkeys(files, tests)
    return tests_of


def measure_limits(tests_of: dict[str, list[str]], files: set[str]) -> dict[str, float]:
    """Return the time limit of each file's mutants; the tests must pass unmutated."""
    seconds: dict[tuple[str, ...], float] = {}
    for file in sorted(files):
        tests = tuple(tests_of[file])
        if tests in seconds:
            continue
        began = time.monotonic()
        unchanged = Mutant("", file, 0, "", Path(file).read_text())
        if run_tests(unchanged, tests_of[file], limit_s=300) != "survived":
            raise SystemExit(f"expected tests that pass, found a failure in {tests}")
        seconds[tests] = time.monotonic() - began
    return {file: 5 + 2 * seconds[tuple(tests_of[file])] for file in files}


def report(sample: list[Mutant], outcomes: dict[str, dict[str, Any]]) -> bool:
    """Print the table; return whether enough mutants were killed and survivors are explained."""
    explained = tomllib.loads((HERE / "survivors.toml").read_text())
    outcome_of = {m: outcomes[m.identifier]["outcome"] for m in sample if m.identifier in outcomes}
    survivors = [mutant for mutant, outcome in outcome_of.items() if outcome == "survived"]
    for mutant in survivors:
        reason = explained.get(mutant.identifier, {}).get("reason", "NOT EXPLAINED")
        print(f"\n{mutant.identifier} {mutant.file}:{mutant.line}: {reason}\n{mutant.diff}")
    share = 1 - len(survivors) / max(1, len(outcome_of))
    counts = dict(Counter(outcome_of.values()))
    print(f"\n{len(outcome_of)} mutants: {counts}; killed {share:.1%}, expected {MIN_KILLED:.0%}")
    return share >= MIN_KILLED and all(mutant.identifier in explained for mutant in survivors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=150, help="mutants in the sample")
    parser.add_argument("--again", action="store_true", help="only what is not killed yet")
    parser.add_argument("--results", type=Path, default=Path("build/mutants.json"))
    options = parser.parse_args()
    tests_of = tests_by_file()
    everything = [mutant for file in tests_of for mutant in mutants_of(file)]
    sample = sorted(everything, key=lambda mutant: mutant.identifier)[: options.size]
    outcomes = json.loads(options.results.read_text()) if options.results.exists() else {}
    killed = {name for name, result in outcomes.items() if result["outcome"] != "survived"}
    due = [mutant for mutant in sample if not (options.again and mutant.identifier in killed)]
    for library in LIBRARIES:
        importlib.import_module(library)
    gc.freeze()  # pytest collects garbage thrice: the libraries' objects need no look each time
    limits = measure_limits(tests_of, {mutant.file for mutant in due})
    options.results.parent.mkdir(exist_ok=True)
    for mutant in due:
        outcome = run_tests(mutant, tests_of[mutant.file], limit_s=limits[mutant.file])
        print(f"{outcome:9}{mutant.file}:{mutant.line}", flush=True)
        described = {name: value for name, value in asdict(mutant).items() if name != "source"}
        outcomes[mutant.identifier] = {**described, "outcome": outcome}
        options.results.write_text(json.dumps(outcomes, indent=1))
    sys.exit(not report(sample, outcomes))


if __name__ == "__main__":
    main()
