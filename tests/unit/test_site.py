"""The documentation as a site: it shows the API, and loads nothing from a network."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.markdown import DOCS

LOADED = re.compile(r"<(?:script|img|link)\b[^>]*?\b(?:src|href)=\"([^\"?]+)")


@pytest.mark.slow
def test_site_shows_the_api_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", str(tmp_path)]
    subprocess.run(build, cwd=DOCS.parent, check=True, timeout=120)
    assert 'id="pipelines.api.train"' in (tmp_path / "api" / "python.html").read_text()
    for page in tmp_path.rglob("*.html"):
        for loaded in LOADED.findall(page.read_text()):
            base = tmp_path if loaded.startswith("/") else page.parent
            assert (base / loaded.lstrip("/")).exists(), (page.name, loaded)
