"""A picture of the packages and their imports, drawn from the code.

    python -m benchmarks.package_picture docs/images/packages.svg

An arrow that follows from others is left out: where `flow` imports `log` and `log` imports
`config`, there is none from `flow` to `config`. A package with a cycle cannot be drawn.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Set
from graphlib import TopologicalSorter
from pathlib import Path

from benchmarks.harness import ROOT

LIBRARY, BESIDE = "areal_flow", ("schemas", "pipelines")
WIDTH, HEIGHT, GAP = 150, 34, 30

Graph = Mapping[str, Set[str]]


def package_of(module: str) -> str:
    """Return a module's package: a folder of the library, or a package beside it."""
    top, _, rest = module.partition(".")
    return rest.partition(".")[0] if top == LIBRARY else top if top in BESIDE else ""


def imports_between_packages(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the packages that each package imports, also inside functions and for types."""
    graph: dict[str, set[str]] = {}
    for top in (LIBRARY, *BESIDE):
        for file in sorted((root / top).rglob("*.py")):
            own = package_of(".".join(file.relative_to(root).with_suffix("").parts))
            if own in ("", "__init__", "__main__"):  # the public names, which are pipelines'
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ImportFrom):
                    modules = [node.module or ""]
                elif isinstance(node, ast.Import):
                    modules = [alias.name for alias in node.names]
                else:
                    continue
                graph.setdefault(own, set()).update(map(package_of, modules))
    return {package: imported - {"", package} for package, imported in graph.items()}


def without_implied(graph: Graph) -> dict[str, set[str]]:
    """Return the transitive reduction of the graph."""
    reachable: dict[str, set[str]] = {}
    for package in TopologicalSorter(graph).static_order():
        imported = set(graph.get(package, ()))
        reachable[package] = imported.union(*(reachable[each] for each in imported))
    return {
        package: {each for each in imported if not any(each in reachable[via] for via in imported)}
        for package, imported in graph.items()
    }


def levels_of(graph: Graph) -> dict[str, int]:
    """Return the length of the longest chain of imports below each package."""
    levels: dict[str, int] = {}
    for package in TopologicalSorter(graph).static_order():
        levels[package] = 1 + max((levels[each] for each in graph.get(package, ())), default=-1)
    return levels


def draw(graph: Graph) -> str:
    """Return the picture; a package is above those it imports."""
    levels = levels_of(graph)
    rows = [
        sorted(p for p in levels if levels[p] == level)
        for level in range(max(levels.values()), -1, -1)
    ]
    step, middle = HEIGHT + GAP, max(map(len, rows)) * (WIDTH + GAP) / 2
    place = {
        package: (middle + (index - (len(row) - 1) / 2) * (WIDTH + GAP), GAP + number * step)
        for number, row in enumerate(rows)
        for index, package in enumerate(row)
    }
    lines = [
        f'<path d="M{place[package][0]:g} {place[package][1] + HEIGHT:g}'
        f'L{place[each][0]:g} {place[each][1] - 6:g}" marker-end="url(#tip)"/>'
        for package, imported in sorted(without_implied(graph).items())
        for each in sorted(imported)
    ]
    boxes = [
        f'<rect x="{x - WIDTH / 2:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>'
        f'<text x="{x:g}" y="{y + HEIGHT / 2 + 5:g}">{package}</text>'
        for package, (x, y) in sorted(place.items())
    ]
    width, height = 2 * middle, len(rows) * step + GAP
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" '
        f'height="{height:g}" viewBox="0 0 {width:g} {height:g}"><style>'
        "rect{fill:#eef3fa;stroke:#3b6ea8}"
        "text{font:15px sans-serif;text-anchor:middle;fill:#1b2a3a}"
        "path{stroke:#7a8794;stroke-width:1.5;fill:none}marker path{fill:#7a8794}</style>"
        '<marker id="tip" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="7" markerHeight="7" '
        'orient="auto"><path d="M0 0L8 4L0 8z"/></marker>'
        f'<rect width="{width:g}" height="{height:g}" style="fill:#fff;stroke:none"/>'
    )
    return "\n".join([head, *lines, *boxes, "</svg>", ""])


def main() -> None:
    """Write the picture to the given path."""
    Path(sys.argv[1]).write_text(draw(imports_between_packages()))


if __name__ == "__main__":
    main()
