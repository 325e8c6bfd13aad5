"""Run an experiment, write its page and its plot: `python -m benchmarks.science NAME --help`.

    python -m benchmarks.science NAME [--seeds 0 1 2] [--quick] [--processes 2] [--to docs/science]

A page keeps what stands outside its markers. `--quick` takes minutes, and is too small to conclude.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import harness
from benchmarks.science.findings import Finding

EXPERIMENTS = (
    "staleness",
    "stability",
    "interruption",
    "packing",
    "schedule",
    "batch",
    "corrections",
    "age",
    "lookup",
)
BEGIN, END = "<!-- written by the script: begin -->", "<!-- written by the script: end -->"
SHARED: dict[str, Any] = {"processes": 2, "quick": False, "to": harness.ROOT / "docs" / "science"}
"""Options of every experiment. Only `processes` changes no figure, but for times."""


def write_page(
    folder: Path, name: str, doc: str, facts: Mapping[str, str], finding: Finding
) -> Path:
    """Write the plot and the text between the page's markers; a new page begins with `doc`."""
    folder.mkdir(parents=True, exist_ok=True)
    plot, page = folder / f"{name}.png", folder / f"{name}.md"
    finding.draw(plot)
    title, _, text = doc.strip().partition("\n")
    before, after = f"# {title.rstrip('.')}\n\n{text.strip()}\n\n", "\n"
    if page.is_file():
        before, _, rest = page.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
    lines = [f"- {fact}: {value}" for fact, value in facts.items()]
    lines += ["", f"![{title}]({plot.name})", "", "## What may be concluded", ""]
    lines += [f"- {conclusion}" for conclusion in finding.conclusions]
    for heading, rows in finding.tables.items():
        lines += ["", f"## {heading}", "", *_table(rows)]
    page.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}")
    return page


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    names = " | ".join(name.replace("_", " ") for name in rows[0])
    head = [f"| {names} |", "|" + "---|" * len(rows[0])]
    return head + [f"| {' | '.join(map(harness.text_of, row.values()))} |" for row in rows]


def main(arguments: Sequence[str]) -> None:
    name, *options = arguments or ("",)
    if name not in EXPERIMENTS:
        sys.exit(f"expected an experiment, one of {', '.join(EXPERIMENTS)}; found {name!r}")
    experiment = import_module(f"benchmarks.science.{name}")
    defaults = {**experiment.OPTIONS, **(experiment.QUICK if "--quick" in options else {})}
    chosen = harness.parse_options(experiment.__doc__, options, **defaults, **SHARED)
    began = perf_counter()
    finding = experiment.run(chosen)
    where = {f"--{option}" for option in (*SHARED, "model", "keep", "json")} - {"--quick"}
    given = [o for flag, o in zip(["", *options], options, strict=False) if not {flag, o} & where]
    command = " ".join(["nox -s science --", name, *given])
    facts = {
        "command": f"`{command}`",
        "seeds": ", ".join(map(str, chosen.seeds)),
        "machine": harness.machine_text(cores=chosen.processes),
        "took": f"{(perf_counter() - began) / 60:.1f} minutes",
        "intervals": "95%, Student's t over seeds; differences are of equal seeds",
    }
    recipe = getattr(chosen, "recipe", harness.RECIPE)
    page_name = name if recipe == harness.RECIPE else f"{name}-{recipe}"
    page = write_page(chosen.to, page_name, experiment.__doc__ or "", facts, finding)
    harness.report(chosen.json, finding.tables)
    print("\n".join(finding.conclusions), f"\n{page}")


if __name__ == "__main__":
    main(sys.argv[1:])
