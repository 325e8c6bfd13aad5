"""The notebooks in `examples/`, which are committed with their outputs.

python -m tests.notebooks      executes them again, and writes their outputs
"""

from __future__ import annotations

import re
import sys
import tempfile
from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = ("first_steps", "explore")
"""In order: the second opens the run that the first trains."""
MAX_BYTES = 120_000
Shape = list[dict[str, list[str]]]


def read(name: str) -> Any:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", 4)


def execute(name: str, folder: Path) -> Any:
    """Return a notebook with the outputs of an execution in this folder."""
    notebook = read(name)
    place = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=150, resources=place).execute()
    return notebook


def shape(notebook: Any) -> Shape:
    """Return the kinds of output of each cell, and the columns of its tables."""
    return [
        {
            "kinds": sorted(
                {kind for output in cell.get("outputs", ()) for kind in _kinds(output)}
            ),
            "columns": [
                name
                for output in cell.get("outputs", ())
                for head in re.findall(r"<thead>.*?</thead>", _html(output), re.DOTALL)
                for name in re.findall(r"<th>(\w+)</th>", head)
            ],
        }
        for cell in notebook.cells
    ]


def _kinds(output: Any) -> list[str]:
    return [output.name] if output.output_type == "stream" else [*output.get("data", {"error": 0})]


def _html(output: Any) -> str:
    return str(output.get("data", {}).get("text/html", ""))


def _small(picture: str) -> str:
    """Return a PNG with fewer colours, which charts do not need."""
    image, small = Image.open(BytesIO(b64decode(picture))), BytesIO()
    image.convert("RGB").quantize(64).save(small, "PNG", optimize=True)
    return b64encode(small.getvalue()).decode()


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch).resolve()
        for name in NAMES:
            notebook = execute(name, folder)
            for cell in notebook.cells:
                cell.metadata.pop("execution", None)  # times
                for output in cell.get("outputs", ()):
                    if picture := output.get("data", {}).get("image/png"):
                        output.data["image/png"] = _small(picture)
            text = nbformat.writes(notebook, 4)
            for here in (folder, Path(sys.executable).parent):
                text = text.replace(f"{here}/", "")
            (EXAMPLES / f"{name}.ipynb").write_text(text)


if __name__ == "__main__":
    main()
