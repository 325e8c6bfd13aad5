"""Reads the options that a file of TRL, verl or AReaL gives: YAML, a Python script, a shell script.

Nothing of the file is executed. YAML and its overrides are read as Hydra and OmegaConf read them: a
number may be `1e-6`, and `${...}` stands for another option.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from areal_flow.config.other_tools import TOOLS, counterparts_of
from areal_flow.core.errors import ConfigError
from areal_flow.core.settings import merge
from pipelines.importing.shell import PUBLISHED, read_overrides

MIN_SHARE = 0.5
"""Minimum share of a file's options that its tool has."""
POSITIONAL = {
    "GRPOConfig": ("output_dir",),
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"),
    "LoraConfig": (),
}
"""Names of the first arguments of the calls that are read."""
LORA_DEFAULT = 8
"""Rank and alpha of PEFT's `LoraConfig`."""
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
_FLOAT = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d+)?|[-+]?\.inf|\.nan")
_OVERRIDE = re.compile(r"(\+\+|\+|~)?([\w@/.-]+)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Options:
    """What a file says."""

    tool: str
    """A key of `TOOLS`."""
    given: dict[str, Any]
    """Values by dotted name; None: off."""
    by_hand: dict[str, str] = field(default_factory=dict)
    """Options whose value cannot be read, and why."""


def read_options(path: Path, overrides: Sequence[str] = ()) -> Options:
    """Read a file by the ending of its name; overrides, as of Hydra, go with YAML and shell."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise ConfigError(f"expected a file at {path}, found none") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}") from None
    match path.suffix:
        case ".yaml" | ".yml":
            return _of_yaml(path, text, overrides)
        case ".sh" | ".bash":
            return _of_shell(path, text, overrides)
        case ".py":
            if overrides:
                raise ConfigError(f"{overrides[0]!r}: overrides go with YAML, not with a script")
            return _of_python(path, text)
    raise ConfigError(
        f"{path}: expected YAML of verl or AReaL (.yaml), a script of TRL (.py) or a shell script "
        "that starts verl (.sh)"
    )


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """YAML in which numbers may be written `1e-6`, as OmegaConf reads them."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(rf"^(?:{_FLOAT.pattern})$"), list("-+0123456789.")
)
_Loader.yaml_implicit_resolvers = {  # an integer is tried before a float
    first: sorted(resolvers, key=lambda each: each[0].endswith("float"))
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}


def _of_yaml(path: Path, text: str, overrides: Sequence[str]) -> Options:
    by_hand: dict[str, str] = {}
    tree = _with_defaults(path, _parsed(path, text), by_hand)
    return _options(path, tree, overrides, by_hand)


def _parsed(path: Path, text: str) -> dict[str, Any]:
    try:
        tree = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected a mapping of options, found {type(tree).__name__}")
    return _string_keys(tree)


def _string_keys(tree: dict[Any, Any]) -> dict[str, Any]:
    return {
        str(key): _string_keys(value) if isinstance(value, dict) else value
        for key, value in tree.items()
    }


def _with_defaults(path: Path, tree: dict[str, Any], by_hand: dict[str, str]) -> dict[str, Any]:
    """Merge the files that Hydra's `defaults` names and that lie beside this one."""
    listed = tree.pop("defaults", None) or []
    tree.pop("hydra", None)
    base: dict[str, Any] = {}
    for entry in listed if isinstance(listed, list) else []:
        if not isinstance(entry, str) or entry in ("_self_", *PUBLISHED):
            continue  # groups of verl's own configuration: its published defaults
        beside = path.with_name(f"{entry}.yaml")
        if beside.is_file() and beside != path:
            own = _parsed(beside, beside.read_text())
            base = merge(base, _with_defaults(beside, own, by_hand))
        else:
            by_hand[f"defaults: {entry}"] = f"there is no {beside.name} beside {path.name}"
    return merge(base, tree)


def _options(
    path: Path,
    tree: dict[str, Any],
    overrides: Sequence[str],
    by_hand: dict[str, str],
    tool: str = "",
) -> Options:
    for override in overrides:
        _override(tree, override)
    given = dict(_resolved(path, tree, by_hand))
    return Options(tool or _tool_of(path, [*given, *by_hand]), given, by_hand)


def _tool_of(path: Path, names: Sequence[str]) -> str:
    """Return the tool that has most of the options; it must have more than half of them."""
    unknown = {tool: [n for n in names if not counterparts_of(tool, n)] for tool in TOOLS}
    tool = min(unknown, key=lambda each: len(unknown[each]))
    if len(unknown[tool]) >= MIN_SHARE * len(names):
        raise ConfigError(
            f"{path}: expected a configuration of verl or AReaL, found options that neither has: "
            f"{', '.join(unknown[tool][:3]) or 'none at all'}"
        )
    return tool


def _override(tree: dict[str, Any], text: str) -> None:
    """Apply an override as of Hydra: `KEY=VALUE`, `+KEY=VALUE`, `++KEY=VALUE` or `~KEY`."""
    match = _OVERRIDE.fullmatch(text)
    if match is None or (match[3] is None) != (match[1] == "~"):
        raise ConfigError(f"{text!r}: expected an override, KEY=VALUE, +KEY=VALUE or ~KEY")
    *sections, last = match[2].split(".")
    for name in sections:
        inner = tree.get(name)
        tree[name] = dict(inner) if isinstance(inner, Mapping) else {}
        tree = tree[name]
    tree[last] = None if match[1] == "~" else _value(match[3])


def _value(text: str) -> Any:
    flow = re.sub(r":(?=[^\s/])", ": ", text) if text.startswith("{") else text
    try:
        return yaml.load(flow, _Loader)
    except yaml.YAMLError:
        return text


@dataclass(frozen=True, slots=True)
class _Unresolved:
    """An interpolation that refers to nothing in the file."""

    text: str


def _resolved(
    path: Path, tree: Mapping[str, Any], by_hand: dict[str, str]
) -> Iterator[tuple[str, Any]]:
    """Yield the options of a tree with interpolations resolved; those that cannot be, by hand."""

    def at(name: str, visited: tuple[str, ...]) -> Any:
        if name in visited:
            chain = " -> ".join((*visited[visited.index(name) :], name))
            raise ConfigError(f"{path}: interpolations refer to each other: {chain}")
        inner: Any = tree
        for part in name.split("."):
            if not isinstance(inner, Mapping) or part not in inner:
                return _Unresolved(f"${{{name}}}")
            inner = inner[part]
        return resolve(inner, name, (*visited, name))

    def resolve(value: Any, name: str, visited: tuple[str, ...]) -> Any:
        if isinstance(value, Mapping):
            inner = {key: (f"{name}.{key}", each) for key, each in value.items()}
            return {key: resolve(each, own, visited) for key, (own, each) in inner.items()}
        if isinstance(value, list):
            return [resolve(each, name, visited) for each in value]
        while isinstance(value, str) and (match := _INNERMOST.search(value)):
            result = interpolated(match[1], name, visited)
            if isinstance(result, _Unresolved):
                return _Unresolved(value)
            if match.span() == (0, len(value)):
                return result
            value = value[: match.start()] + str(result) + value[match.end() :]
        return value

    def interpolated(text: str, name: str, visited: tuple[str, ...]) -> Any:
        resolver, colon, arguments = text.partition(":")
        first, comma, default = (part.strip() for part in arguments.partition(","))
        if not colon:
            return at(absolute(text, name), visited)
        if resolver == "oc.env":
            result: Any = os.environ.get(first, _Unresolved(text))
        elif resolver == "oc.select":
            result = at(absolute(first, name), visited)
        else:
            return _Unresolved(text)
        return _value(default) if comma and isinstance(result, _Unresolved) else result

    def absolute(key: str, name: str) -> str:
        stripped = key.lstrip(".")
        above = name.split(".")[: -(len(key) - len(stripped)) or None]
        return key if key == stripped else ".".join([*above, stripped])

    def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, Mapping) and value:
            for key, inner in value.items():
                yield from leaves(inner, f"{name}.{key}" if name else key)
        elif isinstance(value, _Unresolved):
            by_hand[name] = f"{value.text} refers to nothing in the file"
        elif value != "???":  # OmegaConf's missing value
            yield name, value

    yield from leaves({key: resolve(value, key, (key,)) for key, value in tree.items()}, "")


def _of_shell(path: Path, text: str, overrides: Sequence[str]) -> Options:
    own, by_hand = read_overrides(path, text)
    for option in [each for each in by_hand if any(_key(o) == each for o in overrides)]:
        del by_hand[option]
    return _options(path, {}, [*own, *overrides], by_hand, "verl")


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def _of_python(path: Path, text: str) -> Options:
    """Read the keywords of `GRPOConfig(...)`, `GRPOTrainer(...)` and `LoraConfig(...)`."""
    try:
        module = ast.parse(text)
    except SyntaxError as error:
        raise ConfigError(f"{path} is not valid Python: line {error.lineno}: {error.msg}") from None
    script = _Script(module)
    configs = script.calls("GRPOConfig")
    if len(configs) != 1:
        lines = ", ".join(f"line {call.lineno}" for call in configs)
        number = f"{len(configs)} ({lines}): keep the one to import" if configs else "none"
        raise ConfigError(f"{path}: expected one call of GRPOConfig(...), found {number}")
    given: dict[str, Any] = {}
    by_hand: dict[str, str] = {}
    for function in POSITIONAL:
        calls = script.calls(function)
        prefix = "" if function == "GRPOConfig" else f"{function}."
        for call in calls[:1]:
            script.read(call, prefix, given, by_hand)
        if calls and function == "LoraConfig":
            for name in {"LoraConfig.r", "LoraConfig.lora_alpha"} - by_hand.keys():
                given.setdefault(name, LORA_DEFAULT)
        if len(calls) > 1:
            by_hand[function] = f"it is called {len(calls)} times, and only the first was read"
    for name in ("GRPOTrainer.args", "GRPOTrainer.peft_config"):  # the calls above
        given.pop(name, None)
        by_hand.pop(name, None)
    return Options("trl", given, by_hand)


class _Script:
    """The constants, imports and calls of a Python script."""

    def __init__(self, module: ast.Module) -> None:
        self._nodes = list(ast.walk(module))
        self._imports: dict[str, str] = {}
        bound: dict[str, list[ast.expr | None]] = {}
        for node in self._nodes:
            match node:
                case ast.ImportFrom(module=str(origin), names=names, level=0):
                    pairs = ((each.asname or each.name, each.name) for each in names)
                    self._imports |= {ours: f"{origin}:{name}" for ours, name in pairs}
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    bound.setdefault(name, []).append(value)
                case ast.AnnAssign(target=ast.Name(id=name), value=value):
                    bound.setdefault(name, []).append(value)
                case ast.Name(id=name, ctx=ast.Store()):
                    bound.setdefault(name, []).append(None)
        # An assignment is met as such and as a name that is stored.
        self._constants = {
            name: values[0]
            for name, values in bound.items()
            if values[0] is not None and len(values) == 2
        }

    def calls(self, function: str) -> list[ast.Call]:
        calls = [node for node in self._nodes if isinstance(node, ast.Call)]
        named = [each for each in calls if _last_name(each.func) == function]
        return sorted(named, key=lambda each: each.lineno)

    def read(
        self, call: ast.Call, prefix: str, given: dict[str, Any], by_hand: dict[str, str]
    ) -> None:
        """Add the arguments of a call to the options."""
        positional = dict(zip(POSITIONAL[_last_name(call.func)], call.args, strict=False))
        named = {each.arg or f"**{ast.unparse(each.value)}": each.value for each in call.keywords}
        for argument in call.args[len(positional) :]:
            by_hand[ast.unparse(argument)[:60]] = f"an argument without a name (line {call.lineno})"
        for key, node in (positional | named).items():
            name = key if key.startswith("**") else f"{prefix}{key}"
            try:
                given[name] = self._value(node, functions=key == "reward_funcs")
            except ValueError:
                written = f"{ast.unparse(node)[:60]} (line {node.lineno})"
                by_hand[name] = f"{written} is not a literal"

    def _value(self, node: ast.expr, *, functions: bool) -> Any:
        """Return a literal, or the import path of a function; raise ValueError for all else."""
        match node:
            case ast.Name(id=name) if functions and name in self._imports:
                return self._imports[name]
            case ast.Name(id=name) if name in self._constants:
                return self._value(self._constants[name], functions=functions)
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [self._value(each, functions=functions) for each in elements]
            case ast.Call(func=function, args=[first, *_]):
                if _last_name(function) == "from_pretrained":
                    return self._value(first, functions=False)
        return ast.literal_eval(node)


def _last_name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
