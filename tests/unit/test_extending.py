"""The examples of docs/extending.md and of a tutorial, run against the real parts they extend."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from inspect import getsource, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from areal_flow.algorithms import registry as algorithms
from areal_flow.config import build_recipe
from areal_flow.core.errors import ConfigError, EngineError
from areal_flow.core.settings import import_function
from areal_flow.core.types import Completion, GroupRequest, Sampling, as_tokens
from areal_flow.policy.weights.directory import DirectoryReader, publish_model_directory
from areal_flow.rewards.protocol import RewardInput, RewardSettings
from areal_flow.rewards.registry import WeightedRewards, load_reward
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.registry import ENGINES, engine_factory
from areal_flow.rollout.engines.threaded_engine import ThreadedEngine
from areal_flow.rollout.workflows.episode import RolledOutGroup, run_group
from areal_flow.rollout.workflows.registry import load_workflow
from areal_flow.rollout.workflows.tool_use import tool_result, tools_by_name
from areal_flow.training.settings import StepSettings
from areal_flow.training.step import train_step
from tests import engines
from tests.contracts import test_engines as engine_contract
from tests.contracts import test_rewards as reward_contract
from tests.contracts import test_workflows as workflow_contract
from tests.episodes import LOGITS, FakeServices, episode_of
from tests.fakes import BigramEngine
from tests.markdown import DOCS, blocks, named_files, write_files
from tests.plain import plain
from tests.policies import small_policy, write_model_directory
from tests.unit import test_losses as loss_contract
from tests.unit.test_trainer import make_sequences, state

PAGE = DOCS / "extending.md"


@pytest.fixture(scope="module")
def my_project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], ModuleType]]:
    """Write every example to the file that it names; return how to import one."""
    root = tmp_path_factory.mktemp("copied")
    for page in (PAGE, DOCS / "tutorials" / "verifier.md"):
        write_files(page, root)
    sys.path.insert(0, str(root))
    try:
        yield lambda name: import_module(f"my_project.{name}")
    finally:
        sys.path.remove(str(root))
        for name in [name for name in sys.modules if name.split(".")[0] == "my_project"]:
            del sys.modules[name]


def apply_diff(text: str, before: str) -> str:
    """Apply the page's diff that contains `before` to a text."""
    (diff,) = [block for block in blocks(PAGE.read_text(), "diff") if before in block]
    kept = "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in " -")
    changed = "".join(line[1:] for line in diff.splitlines(keepends=True) if line[0] in " +")
    assert text.count(kept) == 1, "the page shows a registry that is no longer so"
    return text.replace(kept, changed)


def checks_of(contract: ModuleType, *parameters: str) -> dict[str, Callable[..., Any]]:
    """Return a contract's tests that take exactly these parameters."""
    return {
        name: test
        for name, test in vars(contract).items()
        if name.startswith("test_") and tuple(signature(test).parameters) == parameters
    }


def one_quick(checks: Iterable[str]) -> list[Any]:
    """Mark all checks but the first as slow: the shipped parts run them too."""
    first, *others = checks
    return [first, *(pytest.param(check, marks=pytest.mark.slow) for check in others)]


def test_every_block_of_python_is_a_file_that_is_run_here(
    my_project: Callable[[str], ModuleType],
) -> None:
    files = named_files(PAGE)
    assert PAGE.read_text().count("```python") == len(files)
    tested = ("accepted", "adding", "capitals", "tapered", "plain_engine")
    assert [my_project(name).__file__ for name in tested] == [
        my_project(Path(name).stem).__file__ for name in files
    ]


@pytest.mark.usefixtures("my_project")
def test_tool_answers_and_explains_its_refusals() -> None:
    tool = tools_by_name(("my_project.capitals:capital",))["capital"]
    assert tool_result(tool, {"country": "France"}, 10, 100) == "Paris"
    assert tool_result(tool, {"country": "Utopia"}, 10, 100).startswith(
        "Error: LookupError: expected one of france"
    )


VERIFIERS = ("my_project.brevity:short_and_right", "my_project.accepted:AcceptedSpellings")


@pytest.mark.parametrize("check", one_quick(checks_of(reward_contract, "reward")))
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.usefixtures("my_project")
def test_verifiers_pass_the_contract_of_rewards(verifier: str, check: str, tmp_path: Path) -> None:
    getattr(reward_contract, check)(load_reward(verifier, tmp_path).reward)


@pytest.mark.usefixtures("my_project")
def test_verifiers_judge_as_the_page_says(tmp_path: Path) -> None:
    settings = [RewardSettings(verifier=VERIFIERS[0]), RewardSettings(verifier=VERIFIERS[1])]
    rewards = WeightedRewards(settings, tmp_path)
    rewards.open()
    inputs = [
        RewardInput("1 + 1 =", completion, "2", {"max_words": 3})
        for completion in ("2", "it must be 2", "3", "none", "Two")
    ]
    scores = asyncio.run(rewards.score(inputs))
    rewards.close()
    parts = [[part.reward for part in score.parts] for score in scores]
    assert parts == [[1.0, 1.0], [0.5, 0.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]
    assert scores[2].message == "3 is wrong."
    assert scores[3].verdict == "incorrect"


class EngineServices(FakeServices):
    """`EpisodeServices` whose completions come from an engine's thread, and whose tools run."""

    def __init__(self, engine: ThreadedEngine) -> None:
        super().__init__(max_model_len=96)
        self.engine = engine

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        self.requests.append(request)
        return await self.engine.generate(request)

    async def call_tool(self, path: str, calls: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        self.tool_calls += [(path, arguments) for arguments in calls]
        function = import_function(path, setting="a tool", error=ConfigError)
        return [function(*arguments) for arguments in calls]


def adds_up(max_calls: int) -> Any:
    """Return the workflow as a recipe names it."""
    named = {"name": "imported", "path": "my_project.adding:AddsUp"}
    recipe = build_recipe(
        {"workflow": {**named, "settings": {"max_calls": max_calls}}}, source="the page"
    )
    return load_workflow(recipe.workflow, Path())


@pytest.mark.usefixtures("my_project")
def test_workflow_runs_over_an_engine_with_its_tool() -> None:
    async def roll_out() -> tuple[RolledOutGroup, EngineServices]:
        services = EngineServices(ThreadedEngine(BigramEngine(LOGITS, max_num_seqs=64)))
        try:
            return await run_group(adds_up(2), episode_of(), services), services
        finally:
            services.engine.close()

    group, services = asyncio.run(roll_out())
    assert not group.errors
    assert {member for member, _ in group.drafts} == set(range(6))
    results = [sum(map(int, arguments[0].split())) for _, arguments in services.tool_calls]
    prefixes = [services.encode(f" sum: {result}\n").tobytes() for result in results]
    environment = [d.output_tokens[~d.loss_mask].tobytes() for _, d in group.drafts]
    assert len(results) > 3
    assert all(tokens.startswith(tuple(prefixes)) for tokens in environment if tokens)
    assert all(draft.loss_mask[-1] for _, draft in group.drafts)


@pytest.mark.parametrize("check", one_quick(checks_of(workflow_contract, "workflow")))
@pytest.mark.usefixtures("my_project")
def test_workflow_passes_the_contract_of_workflows(check: str) -> None:
    getattr(workflow_contract, check)(adds_up(2))


def test_workflow_refuses_unknown_settings(
    my_project: Callable[[str], ModuleType],
) -> None:
    my_project("adding")
    with pytest.raises(ConfigError, match="max_calls"):
        adds_up(-1)


def test_algorithm_is_in_recipes_by_the_line_that_the_page_shows(
    my_project: Callable[[str], ModuleType],
) -> None:
    line = "from my_project.tapered import Tapered\n"
    source = apply_diff(getsource(algorithms), "AnyAlgorithm").replace("AnyAlg", line + "AnyAlg", 1)
    changed = ModuleType("changed_registry")
    exec(compile(source, "registry", "exec", dont_inherit=True), vars(changed))
    assert changed.ALGORITHMS["tapered"] is my_project("tapered").Tapered
    assert set(changed.ALGORITHMS) == {*algorithms.ALGORITHMS, "tapered"}


def test_algorithm_has_the_golden_losses_and_gradients_of_its_formula(
    my_project: Callable[[str], ModuleType],
) -> None:
    """Of the ratios e^0.5, e^-0.1 and e^1.5 the second alone has a negative advantage."""
    given = loss_contract.inputs()
    loss = my_project("tapered").Tapered().loss(given)
    assert loss.losses_T.tolist() == pytest.approx([1.0, -0.452419, 4.0], abs=1e-6)
    assert loss.metrics["clip_fraction"].value == pytest.approx(2 / 3)
    loss.losses_T.sum().backward()
    assert given.logprobs_T.grad.tolist() == pytest.approx([-1.0, 0.904837, -2.0], abs=1e-6)


@pytest.mark.parametrize(
    "check",
    one_quick(name for name in checks_of(loss_contract, "name") if "every_algorithm" in name),
)
def test_algorithm_passes_the_contract_of_algorithms(
    my_project: Callable[[str], ModuleType], check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(algorithms.ALGORITHMS, "tapered", my_project("tapered").Tapered)
    getattr(loss_contract, check)("tapered")


def test_algorithm_trains_a_step(my_project: Callable[[str], ModuleType]) -> None:
    backend = state()
    before = backend.fingerprint()
    settings = StepSettings(
        my_project("tapered").Tapered(num_minibatches=2), temperature=1.0, seed=0
    )
    numbers = train_step(backend, make_sequences(), step=1, settings=settings)
    assert backend.fingerprint() != before
    assert 0 < numbers.metrics["clip_fraction"].value < 1


def plain_subject(engine: ModuleType) -> engines.Subject:
    """Return the page's engine with the torch engine's weights and reference."""
    torch_subject = engines.torch_subject()

    def make(*, max_num_seqs: int = 8, version: int = 0) -> Any:
        policy = small_policy(seed=version, vocab_size=engines.VOCABULARY)
        return engine.PlainEngine(
            policy, version=version, max_num_seqs=max_num_seqs, max_model_len=64
        )

    return engines.Subject(make, torch_subject.weights, torch_subject.reference)


CORE_CHECKS = (
    "test_tokens_after_an_interruption_come_from_the_new_weights",
    "test_members_that_start_after_a_switch_come_from_the_new_weights",
    "test_stop_token_ends_a_completion_and_is_kept",
    "test_more_members_than_slots_all_finish",
    "test_cancelled_request_frees_its_slots",
    "test_empty_prompt_is_refused",
)


@pytest.mark.parametrize("check", one_quick(CORE_CHECKS))
def test_engine_passes_the_contract_of_engines(
    my_project: Callable[[str], ModuleType], check: str
) -> None:
    getattr(engine_contract, check)(plain_subject(my_project("plain_engine")))


def test_engine_gives_the_log_probabilities_of_a_full_forward(
    my_project: Callable[[str], ModuleType],
) -> None:
    subject = plain_subject(my_project("plain_engine"))
    early = {"repetition_penalty": 1.3, "min_new_tokens": 4, "stop_token_ids": (2,)}
    sampling = {"temperature": 0.7, **early}
    engine_contract.test_logprobs_equal_a_full_forward(subject, sampling)


def test_engine_draws_the_same_whatever_else_runs(
    my_project: Callable[[str], ModuleType],
) -> None:
    subject = plain_subject(my_project("plain_engine"))
    requests = [engines.request_of(f"r{index}", length=6) for index in range(3)]
    alone = engines.run_all(subject.make(), requests[1])["r1"]
    crowd = engines.run_all(subject.make(max_num_seqs=5), *requests)
    assert plain(crowd["r1"]) == plain(alone)


@asynccontextmanager
async def started_engine(tmp_path: Path, **settings: Any) -> AsyncIterator[Any]:
    """Start the engine that a recipe calls `plain`, on a model directory."""
    model = write_model_directory(tmp_path / "model")
    publish_model_directory(model, tmp_path / "weights")
    chosen = GenerationSettings(
        engine="plain", max_num_seqs=2, max_model_len=32, max_new_tokens=4, **settings
    )
    reader = DirectoryReader(tmp_path / "weights")
    engine = await engine_factory("plain")(model, chosen, reader)
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.usefixtures("my_project")
async def test_engine_starts_by_the_name_that_the_page_registers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(import_module("areal_flow.rollout.engines.registry").__file__ or "").read_text()
    namespace = vars(ModuleType("changed_registry"))
    exec(compile(apply_diff(source, "ENGINES"), "registry", "exec", dont_inherit=True), namespace)
    monkeypatch.setitem(ENGINES, "plain", namespace["ENGINES"]["plain"])
    async with started_engine(tmp_path) as engine:
        assert engine.version == 0
        (completion,) = await engine.generate(
            GroupRequest("r", as_tokens([5, 6]), (1,), Sampling(4))
        )
        assert len(completion.tokens) == 4
        with pytest.raises(EngineError, match="expected at most 32 tokens of context"):
            await engine.generate(GroupRequest("long", as_tokens([5] * 30), (1,), Sampling(4)))
    with pytest.raises(ConfigError, match="expected 'interrupt'"):
        async with started_engine(tmp_path / "keep", interruption="keep"):
            pass
