"""The Dask tasks of generators: they run episodes, and load weights in between.

A worker that starts late or again finds recipe, model and newest weights in the run directory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from distributed import Worker, get_worker

from areal_flow.cluster.reward_tasks import (
    call_tool,
    checked_rewards,
    own_addresses,
    score_completions,
)
from areal_flow.cluster.sandbox_service import RemoteSandbox
from areal_flow.cluster.scoring import on_reward_worker
from areal_flow.cluster.worker import WorkerContext, worker_context
from areal_flow.config import Recipe
from areal_flow.core.concurrency import all_of
from areal_flow.core.errors import EngineError, EpisodeError
from areal_flow.core.machine import TOGETHER, gpu_lock
from areal_flow.core.types import (
    Completion,
    EngineStats,
    Episode,
    GroupRequest,
    Prompt,
    Sampling,
    Score,
    ServedWeights,
    Tokens,
    as_tokens,
)
from areal_flow.log.codec import RolloutRows, rollout_rows
from areal_flow.policy.checkpoints import checkpoint_path
from areal_flow.policy.tokenizer.chat import PROMPT_END, Message, ToolCall, begins_reasoning
from areal_flow.policy.tokenizer.directory import stop_token_ids, vocab_size_of
from areal_flow.policy.weights.shared_memory import ChosenChannel
from areal_flow.rollout.engines.protocol import Engine, GenerationSettings
from areal_flow.rollout.engines.registry import choose_engine, engine_factory
from areal_flow.rollout.prompts.rendering import conversation, required_chat_template
from areal_flow.rollout.prompts.rows import question_of
from areal_flow.rollout.workflows.agent import Agent
from areal_flow.rollout.workflows.episode import FAILURES, run_group
from areal_flow.rollout.workflows.registry import load_workflow
from areal_flow.sandboxes.protocol import Sandbox
from areal_flow.sandboxes.registry import SandboxSettings


class GeneratorRole:
    """A generator's engine, made on first use, and the `EpisodeServices` of its episodes."""

    def __init__(self, context: WorkerContext) -> None:
        generation = context.recipe.generation
        self.workflow = load_workflow(context.recipe.workflow, context.layout.rewards)
        if isinstance(self.workflow, Agent):
            checked_rewards(context)
        self.max_model_len = generation.max_model_len
        model = context.layout.model
        self.vocab_size = vocab_size_of(model) or context.tokenizer.get_vocab_size()
        self.sampling = Sampling(
            max_new_tokens=generation.max_new_tokens,
            temperature=generation.temperature,
            stop_token_ids=stop_token_ids(model) + generation.stop.token_ids,
            stop_strings=generation.stop.strings,
        )
        plan = self._plan = context.recipe.prompt_plan()
        self._chat = required_chat_template(plan, plan.rows.prompts, model)
        self.is_chat = self._chat is not None
        self._context = context
        root = context.layout.weights_of(context.writer_epoch)
        base = checkpoint_path(context.layout.checkpoints, 0)
        self._reader = ChosenChannel(
            root,
            context.recipe.weights_medium,
            base=base if generation.vllm.serves_adapter else None,
        )
        self._loading = asyncio.Lock()
        self._engine: Engine | None = None
        self._is_asleep = False
        self.served: ServedWeights | None = None
        """What the engine serves; every heartbeat carries it."""
        self._num_updates = 0

    @property
    def is_serving(self) -> bool:
        return self._engine is not None and not self._engine.broken

    async def serve(self, version: int) -> Engine:
        """Return the engine once it serves `version` or later; a new engine loads the newest."""
        async with self._loading:
            if self._engine is None or self._engine.broken:
                self.close()
                generation = await asyncio.to_thread(
                    engine_settings, self._context.recipe, self._context.layout.model
                )
                start = await asyncio.to_thread(engine_factory, choose_engine(generation).name)
                async with self._turn():
                    self._engine = await start(self._context.layout.model, generation, self._reader)
                self._note_update(stall_s=0.0)
                version = max(version, self._reader.newest())
            if self._is_asleep:
                async with self._turn():
                    await self._engine.wake()
                    self._is_asleep = False
            if self._engine.version < version:
                before_s = self._engine.stats().stall_s
                # A network file system may list old versions when there are new ones.
                newest = max(version, self._reader.newest())
                await self._engine.load_weights(newest, self._reader)
                self._note_update(stall_s=self._engine.stats().stall_s - before_s)
                self._num_updates += 1
            return self._engine

    def _turn(self) -> AbstractAsyncContextManager[None]:
        """Wait until the trainer is not at its turn, where both have one GPU."""
        context = self._context
        if not context.recipe.takes_turns:
            return nullcontext()
        return gpu_lock(context.layout.processes_of(context.writer_epoch), TOGETHER)

    async def sleep(self) -> None:
        """Leave the GPU to the trainer; requests go on once `serve` is called after its turn."""
        if self._engine is None or self._is_asleep:  # `serve` may be waiting for its turn
            return
        async with self._loading:
            try:
                if self._engine:
                    await self._engine.sleep()
                    self._is_asleep = True
            except EngineError:
                self.close()  # which leaves it, too

    def _note_update(self, *, stall_s: float) -> None:
        if loaded := self._reader.last_load:
            self.served = ServedWeights(
                loaded.version, loaded.content_hash, loaded.transfer_s, stall_s
            )

    def stats(self) -> EngineStats:
        return self._engine.stats() if self._engine else EngineStats()

    def engine_state(self) -> dict[str, float]:
        """Return totals of the engine and what it holds now, by the names that monitoring shows."""
        stats = self.stats()
        return {
            "tokens_total": stats.num_tokens,
            "busy_seconds_total": stats.busy_s,
            "stall_seconds_total": stats.stall_s,
            "weight_updates_total": self._num_updates,
            **({"policy_version": self.served.policy_version} if self.served else {}),
            **(self._engine.occupancy() if self._engine else {}),
        }

    def close(self) -> None:
        if self._engine:
            self._engine.close()
            self._engine = self.served = None
            self._is_asleep = False
        FAILURES.sum_up()

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        engine = await self.serve(0)
        return await engine.generate(request)

    async def score(self, prompt: Prompt, completions: Sequence[Tokens]) -> Sequence[Score]:
        version = self._engine.version if self._engine else 0
        return await on_reward_worker(score_completions, (prompt, version), completions)

    async def call_tool(self, path: str, calls: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        return await on_reward_worker(call_tool, path, calls)

    async def new_sandbox(self, settings: SandboxSettings) -> Sandbox:
        (address,) = await on_reward_worker(own_addresses, None, [None])
        if isinstance(address, Exception):
            raise address
        return RemoteSandbox(get_worker(), address, settings)

    def next_turn(self, contents: Sequence[str], ended_by: int, role: str) -> Tokens:
        if self._chat is None:
            return self.encode("\n".join(contents))
        end = self._context.tokenizer.decode([ended_by], skip_special_tokens=False)
        turn = self._chat.next_turn(*map(str.strip, contents), ended_by=end, role=role)
        return self.encode(turn)

    def chat_calls(self, prompt: Tokens, answer: Tokens) -> Sequence[ToolCall]:
        assert self._chat is not None
        decode = partial(self._context.tokenizer.decode, skip_special_tokens=False)
        is_thinking = begins_reasoning(decode(prompt[-PROMPT_END:].tolist()))
        return self._chat.calls_in(decode(answer.tolist()), is_thinking=is_thinking)

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        after: tuple[int, int] | None = None,
    ) -> Tokens:
        assert self._chat is not None
        if after is None:
            return self.encode(self._chat.render(messages, tools=tools))
        at, last = after
        ended = [] if last < 0 else [last]
        end = self._context.tokenizer.decode(ended, skip_special_tokens=False)
        return self.encode(self._chat.following(messages, at, ended_by=end, tools=tools))

    def conversation(self, prompt: Prompt) -> Sequence[Message]:
        settings = self._plan.rows_of(prompt.source).prompts
        return conversation(question_of(dict(prompt.metadata), settings), settings)

    def encode(self, text: str) -> Tokens:
        return as_tokens(self._context.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Tokens) -> str:
        return self._context.tokenizer.decode(tokens.tolist())


def engine_settings(recipe: Recipe, model: Path) -> GenerationSettings:
    """Return the recipe's settings of the engine; beside a trainer, vLLM's cache has a fixed size.

    Raises:
        EngineError: the cache has no room for one sequence.
    """
    settings = recipe.generation
    is_vllm = choose_engine(settings).name == "vllm"
    if not (is_vllm and recipe.shares_gpu) or settings.kv_cache_tokens:
        return settings
    import torch

    from areal_flow.planning.memory import planned_cache
    from areal_flow.training.tensor_rows import shapes_of

    num_bytes = torch.cuda.get_device_properties(settings.device).total_memory
    return planned_cache(recipe, shapes_of(model), num_bytes)


async def rollout(episodes: Sequence[Episode], version: int) -> RolloutRows:
    """Run the workflow for some groups, side by side, with weights of `version` or later.

    Raises:
        EpisodeError: it failed for all members of a group that can be tried again.
    """
    context = worker_context()
    role = await _role(context)
    started_at = datetime.now(UTC)
    await role.serve(version)
    groups = await all_of(run_group(role.workflow, episode, role) for episode in episodes)
    for episode, group in zip(episodes, groups, strict=True):
        if group.has_failed and not episode.is_last_attempt:
            raise EpisodeError(group.errors[-1])
    return rollout_rows(
        list(zip(episodes, groups, strict=True)),
        generator=context.worker_name,
        started_at=started_at,
        engine_stats=role.stats(),
    )


async def load_weights(version: int, dask_worker: Worker) -> ServedWeights | None:
    """Have this generator load `version`; return what it serves then. For `client.run`.

    Returns None if there is no engine yet: to make one takes up to half a minute, and it will load
    the newest weights by itself.
    """
    role = worker_context(dask_worker).get(GeneratorRole)
    if role is not None and role.is_serving:
        await role.serve(version)
        return role.served
    return None


async def sleep(dask_worker: Worker) -> None:
    """Have this generator leave the GPU to the trainer. For `client.run`."""
    role = worker_context(dask_worker).get(GeneratorRole)
    if role is not None:
        await role.sleep()


async def import_engine(dask_worker: Worker) -> None:
    """Import what the engine needs, before there are weights to load. For `client.run`.

    In a thread: on the event loop, a long import would delay heartbeats.
    """
    recipe = worker_context(dask_worker).recipe
    await asyncio.to_thread(engine_factory, choose_engine(recipe.generation).name)


async def prepare_generator(dask_worker: Worker) -> None:
    """Make the engine before the first rollout. For `client.run`."""
    role = await _role(worker_context(dask_worker))
    await role.serve(0)


def engine_stats(dask_worker: Worker) -> EngineStats:
    role = worker_context(dask_worker).get(GeneratorRole)
    return role.stats() if role else EngineStats()


async def _role(context: WorkerContext) -> GeneratorRole:
    if (role := context.get(GeneratorRole)) is not None:
        return role
    return await asyncio.to_thread(context.ensure, GeneratorRole, lambda: GeneratorRole(context))
