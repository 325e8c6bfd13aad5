"""Megabytes of each package of the base install, who requires it, and which a small run imports.

Sizes are those of the files in each package's RECORD. A package is imported if a file of it is that
of a module in `sys.modules`, of the driver or of a process that it started. The run writes its
report; nobody opens a page. `alone` is what would not be installed if the project did not require
the package. Installed extras do not count.

    python -m benchmarks.install_size [--at-least-mb 5] [--json FILE]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks import harness

PROJECT = "areal-flow"
RECORDER = '''
"""Write the file of each module of this process, once, into a file named after the process."""
import atexit, os, sys

FOLDER, seen = {folder!r}, set()

class Recorder:
    def find_spec(self, *_):
        record()

def record():
    new = sys.modules.keys() - seen
    seen.update(new)
    files = [getattr(sys.modules.get(name), "__dict__", {{}}).get("__file__") for name in new]
    with open(f"{{FOLDER}}/{{os.getpid()}}", "a") as output:
        output.writelines(f"{{file}}\\n" for file in files if file)

sys.meta_path.insert(0, Recorder())
atexit.register(record)
'''
SMALL = {
    "num-steps": 2,
    "sft.num-steps": 5,
    "prompts.num-prompts": 400,
    "prompts.num-held-out": 16,
    "controller.batch-size": 32,
}


def base_install(
    installed: Mapping[str, Distribution], *, without: str = ""
) -> dict[str, set[str]]:
    """Return who requires each package that the project requires, directly or not.

    Optionally as if the project itself did not require a package.
    """
    requirers: dict[str, set[str]] = defaultdict(set)
    pending, visited = [(PROJECT, frozenset[str]())], set[tuple[str, frozenset[str]]]()
    while pending:
        name, extras = pending.pop()
        if (name, extras) in visited:
            continue
        visited.add((name, extras))
        for text in installed[name].requires or ():
            required = Requirement(text)
            dependency, marker = str(canonicalize_name(required.name)), required.marker
            if marker and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                continue
            if (name, dependency) != (PROJECT, without):
                requirers[dependency].add(name)
                pending.append((dependency, frozenset(required.extras)))
    return requirers


def imported_by_a_run() -> dict[str, set[Path]]:
    """Train a few steps; return the files of modules of the driver, and of all its workers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        modules = folder / "modules"
        modules.mkdir()
        (folder / "sitecustomize.py").write_text(RECORDER.format(folder=str(modules)))
        command = [*harness.CLI, "train", "--name", "run", *harness.flags(SMALL)]
        path = f"{folder}:{harness.ROOT}"
        with (folder / "output").open("w") as output:
            driver = subprocess.Popen(
                command,
                cwd=folder,
                env=harness.environment(PYTHONPATH=path),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            if driver.wait():
                sys.exit(f"the run failed:\n{(folder / 'output').read_text()}")
        files: dict[str, set[Path]] = {"driver": set(), "workers": set()}
        for record in modules.iterdir():
            role = "driver" if record.name == str(driver.pid) else "workers"
            files[role].update(map(Path, record.read_text().splitlines()))
    return files


def files_of(package: Distribution) -> dict[Path, int]:
    paths = [Path(str(package.locate_file(file))) for file in package.files or ()]
    return {path: path.stat().st_size for path in paths if path.is_file()}


def measure(imported: Mapping[str, set[Path]]) -> list[dict[str, object]]:
    """Return a row for each package of the base install, the largest first."""
    installed = {str(canonicalize_name(each.name)): each for each in distributions()}
    requirers = base_install(installed)
    files = {name: files_of(installed[name]) for name in requirers}
    sizes_mb = {name: sum(files[name].values()) / 1e6 for name in requirers}
    rows = []
    for name in sorted(requirers, key=lambda name: -sizes_mb[name]):
        left = base_install(installed, without=name)
        alone_mb = sum(sizes_mb[each] for each in requirers.keys() - left.keys())
        is_direct = PROJECT in requirers[name]
        rows.append(
            {
                "package": name,
                "MB": round(sizes_mb[name], 1),
                "alone_MB": round(alone_mb, 1) if is_direct else "",
                "imported_by": ", ".join(
                    role for role, modules in imported.items() if modules & files[name].keys()
                ),
                "required_by": ", ".join(sorted(requirers[name])),
            }
        )
    return rows


def main() -> None:
    """Measure, and print the packages of some size."""
    chosen = harness.parse_options(__doc__, at_least_mb=5.0)
    rows = measure(imported_by_a_run())
    total_mb = sum(float(str(row["MB"])) for row in rows)
    shown = [row for row in rows if float(str(row["MB"])) >= chosen.at_least_mb]
    title = f"{len(rows)} packages, {total_mb:,.0f} MB; those of {chosen.at_least_mb:g} MB or more"
    harness.report(chosen.json, {title: shown})


if __name__ == "__main__":
    main()
