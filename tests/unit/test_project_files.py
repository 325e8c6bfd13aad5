"""The files that a repository's host reads agree with the project."""

from __future__ import annotations

import re

import yaml

from areal_flow.core.program import VERSION
from benchmarks.harness import ROOT

FORMS = ROOT / ".github" / "ISSUE_TEMPLATE"


def test_citation_and_changelog_name_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION
    assert [reference["url"] for reference in citation["references"]] == [
        "https://arxiv.org/abs/2505.24298"
    ]
    assert VERSION in (ROOT / "CHANGELOG.md").read_text()


def test_workflow_runs_what_developers_run_without_secrets() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    workflow = yaml.safe_load(text)
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert {"run": ".ci/run"} in steps
    used = [step["uses"] for step in steps if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", action) for action in used), used
    assert workflow["permissions"] == {"contents": "read"}
    assert "secrets." not in text


def test_issue_forms_have_unique_fields_and_ask_for_the_version() -> None:
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in FORMS.glob("*.yml")}
    assert forms.keys() == {"bug", "feature"}
    for form in forms.values():
        names = [field["id"] for field in form["body"]]
        assert len({*names}) == len(names)
    labels = [field["attributes"]["label"] for field in forms["bug"]["body"]]
    assert {"areal-flow --version", "areal-flow doctor"} <= {*labels}
