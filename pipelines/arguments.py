"""Arguments of the Python API as a recipe has them: settings, rewards, rows of any table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from areal_flow.config.listing import setting_names
from areal_flow.config.messages import did_you_mean, spell
from areal_flow.core.errors import ConfigError, PromptError
from areal_flow.core.settings import nest
from areal_flow.rewards.protocol import RewardSettings
from areal_flow.rewards.shipping import SHIPPED
from areal_flow.rollout.engines.protocol import WHOLE_DISTRIBUTION
from areal_flow.rollout.prompts.formats import hub_dataset
from pipelines.jobs.built_in import write_jsonl

Rows = Any
"""As `prompts.path`, or dicts, or a pandas, polars, Arrow or Hugging Face table."""
Reward = Callable[..., Any] | str | Mapping[str, Any] | RewardSettings
Rewards = Reward | Sequence[Reward]
Function = Callable[..., Any] | str
"""A function, or its import path."""
NOT_OF_TRAINING = {
    "sft.": "fine-tuning and preferences",
    **{f"evaluation.{name}": "evaluations" for name in WHOLE_DISTRIBUTION},
}
"""Settings that training does not read, although other tools have them, and who reads them."""


def placed(
    settings: Mapping[str, Any],
    *,
    section: str = "",
    refused: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a nested table of settings; see `full_name` for those without a section."""
    table = {}
    for key, value in settings.items():
        name = full_name(key, value, section=section, refused=refused)
        table[name] = str(value.expanduser().absolute()) if isinstance(value, Path) else value
    return nest(table)


def full_name(
    name: str,
    value: object,
    *,
    section: str = "",
    refused: Mapping[str, str] = MappingProxyType({}),
    spelling: str = "",
) -> str:
    """Return a setting's name with its section, which it needs only where several have it.

    Args:
        section: takes precedence; otherwise the shallowest sections do, and any over `sft`.
        refused: prefixes of settings, `sft.` or `evaluation.top_p`, that need their section; and
            who reads them.
        spelling: how messages spell a setting, such as `OPTION`; empty: as a keyword.

    Raises:
        ConfigError: several sections have it, or only one that is refused.
    """

    def spelled(full: str) -> str:
        return spell(full, spelling) if spelling else f"**{{{full!r}: {value!r}}}"

    names = setting_names(in_arrays=False)
    homes = [each for each in names if each.endswith(f".{name}")]
    homes = [each for each in homes if not each.startswith("sft.")] or homes
    homes = [each for each in homes if each.count(".") == min(n.count(".") for n in homes)]
    if (own := f"{section}.{name}") in names:
        homes = [own]
    elif name in names or not homes:
        homes = [name]  # validation refuses an unknown one
    given = spell(name, spelling) if spelling else name
    if len(homes) > 1:
        choices = [spell(each, spelling) if spelling else each for each in homes]
        example = "" if spelling else f", as in {spelled(homes[0])}"
        raise ConfigError(
            f"{given}: several sections have such a setting; expected one of "
            f"{', '.join(choices)}{example}"
        )
    for prefix, reader in refused.items():
        if homes[0].startswith(prefix) and name != homes[0]:
            others = [spell(each, spelling or "{}") for each in names if each != homes[0]]
            raise ConfigError(
                f"{given}: {homes[0]} has this name, which only {reader} read: to set that, "
                f"{spelled(homes[0])}{did_you_mean(name, others)}"
            )
    return homes[0]


def reward_tables(rewards: Rewards) -> list[dict[str, Any]]:
    """Return a `[[rewards]]` table of each reward; its `verifier` may be a function."""
    is_one = callable(rewards) or isinstance(rewards, str | Mapping | RewardSettings)
    listed = [rewards] if is_one or not isinstance(rewards, Iterable) else rewards
    tables = []
    for each in listed:
        if isinstance(each, RewardSettings):
            each = each.model_dump(exclude_unset=True)
        table = dict(each) if isinstance(each, Mapping) else {"verifier": each}
        verifier = table.get("verifier")
        if not callable(verifier) and not isinstance(verifier, str):
            raise ConfigError(
                "expected a reward as a function, the name of a verifier, or a table with one, as "
                f'{{"verifier": f, "weight": 0.5}}, found {type(each).__name__}: {each!r:.80}'
            )
        tables.append(table)
    return tables


def name_of(reward: Mapping[str, Any]) -> str:
    """Return the name of a reward's verifier; for a function, a placeholder until it is shipped."""
    verifier = reward["verifier"]
    return verifier if isinstance(verifier, str) else f"{SHIPPED}{verifier!r}"


def workflow_table(
    workflow: Any, agent: Function | None, tools: Function | Sequence[Function]
) -> dict[str, Any]:
    """Return the `[workflow]` table of the arguments; its functions are not shipped yet."""
    if agent is not None and tools:
        raise ConfigError("expected agent or tools, found both: an agent calls its own tools")
    if workflow is not None and not isinstance(workflow, Mapping):
        workflow = {"name": workflow}
    table: dict[str, Any] = dict(workflow or {})
    implied: dict[str, Any] = {}
    if agent is not None:
        implied = {"name": "agent", "path": agent}
    elif tools:
        implied = {"name": "tool_use", "tools": tools}
    for key, value in implied.items():
        if table.get(key, value) != value:
            argument = "agent" if agent is not None else "tools"
            raise ConfigError(
                f"workflow.{key} = {table[key]!r} does not go with {argument}: leave one out"
            )
    return {**table, **implied}


def with_names(
    workflow: Mapping[str, Any], name_of: Callable[[Callable[..., Any]], str]
) -> dict[str, Any]:
    """Return a `[workflow]` table with the name of each function in its place."""

    def named(function: Any) -> Any:
        return name_of(function) if callable(function) else function

    table = dict(workflow)
    if "path" in table:
        table["path"] = named(table["path"])
    if "tools" in table:
        tools = table["tools"]
        is_single = callable(tools) or isinstance(tools, str) or not isinstance(tools, Iterable)
        table["tools"] = [named(each) for each in ([tools] if is_single else tools)]
    return table


def placeholder(function: Callable[..., Any]) -> str:
    """Return the name of a function until it is shipped."""
    return f"{SHIPPED}{getattr(function, '__name__', type(function).__name__)}@0"


@contextmanager
def bad_rows_numbered(
    rows: Rows | None, *, stem: str, name: str = "the rows given"
) -> Iterator[None]:
    """Name bad rows that were given in memory by their number, not by our file `stem`.jsonl."""
    try:
        yield
    except PromptError as error:
        if rows is None or isinstance(rows, Path | str):
            raise
        place = rf"/\S.*?{stem}\.jsonl, line (\d+)"
        raise PromptError(re.sub(place, rf"row \1 of {name}", str(error))) from None


def file_of(rows: Rows, path: Path) -> Path:
    """Return the path of rows, or their name on the hub; rows in memory are written to `path`."""
    if not isinstance(rows, Path | str):
        return write_jsonl(path.resolve(), rows_of(rows))
    return Path(rows) if hub_dataset(Path(rows)) else Path(rows).resolve()


def rows_of(table: Rows) -> Iterator[dict[str, Any]]:
    """Yield the rows of a table of any kind as dicts of plain values."""
    if hasattr(table, "notna"):  # pandas has NaN, NA or NaT for missing values
        table = table.astype(object).where(table.notna(), None)
    if method := next((name for name in _AS_DICTS if hasattr(table, name)), ""):
        table = getattr(table, method)(*_AS_DICTS[method])
    if isinstance(table, str | Mapping) or not isinstance(table, Iterable):
        raise ConfigError(
            "expected rows as a path, a list of dicts, or a pandas, polars, Arrow or Hugging Face "
            f"table (of a DatasetDict one split), found {type(table).__name__}"
        )
    for row in table:
        if not isinstance(row, Mapping):
            raise ConfigError(f"expected a row as a dict, found {type(row).__name__}: {row!r:.80}")
        yield json.loads(json.dumps(dict(row), default=_plain))


_AS_DICTS: dict[str, tuple[str, ...]] = {
    "to_dicts": (),  # polars
    "to_pylist": (),  # Arrow
    "to_list": (),  # Hugging Face
    "to_dict": ("records",),  # pandas
}


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)
