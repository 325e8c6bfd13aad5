"""`areal-flow import`, and the page of what TRL, verl and AReaL call a setting.

python -m pipelines.cli.importing > docs/guides/names.md
"""

from __future__ import annotations

from areal_flow.config.other_tools import TOOLS, Counterpart, counterparts

VERSIONS = {"trl": "TRL 1.16", "verl": "verl 0.10", "areal": "AReaL 1.0.4"}


def names_page() -> str:
    lines = [
        "# Names in TRL, verl and AReaL",
        "",
        "What their options are called here, and where the meaning differs. Defaults are theirs,",
        "where they count. Unknown options are answered from these tables, on the command line and",
        "in Python. Made from `areal_flow/config/other_tools.toml` by",
        "`python -m pipelines.cli.importing > docs/guides/names.md`.",
    ]
    for tool in TOOLS:
        records = [each for several in counterparts(tool).values() for each in several]
        lines += ["", f"## {VERSIONS[tool]}", ""]
        lines += ["| option | here | default | what differs |", "|---|---|---|---|"]
        lines += [_row(each) for each in records if each.setting]
        lines += ["", "Without a counterpart:", "", "| option | why |", "|---|---|"]
        options: dict[str, list[str]] = {}
        for each in records:
            if each.reason:
                fixed = "" if each.value is None else f" (other than {_shown(each.value)})"
                options.setdefault(each.reason, []).append(f"`{each.option}`{fixed}")
        lines += [f"| {', '.join(names)} | {reason} |" for reason, names in options.items()]
    return "\n".join([*lines, ""])


def _row(record: Counterpart) -> str:
    changed = ((theirs, ours) for theirs, ours in record.values.items() if theirs != ours)
    values = (f"{theirs} is {ours or 'left out'}" for theirs, ours in changed)
    differs = "; ".join(filter(None, [record.note, ", ".join(values)]))
    default = "" if record.default is None else _shown(record.default)
    return f"| `{record.option}` | `{record.setting}` | {default} | {differs} |"


def _shown(value: object) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(names_page(), end="")
