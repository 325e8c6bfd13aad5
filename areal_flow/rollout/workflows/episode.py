"""An episode: what a workflow is given, what it makes of it, and how a group's members run it.

Members of a group that ask for the same in the same event-loop turn become one request: a prompt
is prefilled once for its group, a turn's completions are scored in one task, and one tool's calls
are made in one.

A member whose workflow fails does not end the others: it becomes a trajectory without tokens, whose
score has the error.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from time import monotonic
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from areal_flow.core.concurrency import all_of
from areal_flow.core.errors import ArealFlowError, EngineError, WeightsError
from areal_flow.core.failures import FailureCounts, cause_of
from areal_flow.core.settings import Settings
from areal_flow.core.types import (
    Completion,
    Episode,
    FinishReason,
    GroupRequest,
    Logprobs,
    Prompt,
    Sampling,
    Score,
    Tokens,
    ToolRecord,
    VersionSpan,
    as_tokens,
    counter_seed,
    merged_spans,
)
from areal_flow.policy.tokenizer.chat import Message, ToolCall
from areal_flow.sandboxes.protocol import Sandbox, opened
from areal_flow.sandboxes.registry import SandboxSettings

OnToken = Callable[[int], None]
"""Receives each token of a completion as it is sampled."""

FAILURES = FailureCounts("an episode")
"""Of the workflows of this process."""

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class TrajectoryDraft:
    """A trajectory as a workflow builds it: tokens are only ever appended.

    `output_tokens`, `loss_mask` and `behavior_logprobs` are aligned, and `version_spans` cover as
    many tokens. A draft without a score is scored by the recipe's rewards.
    """

    prompt_tokens: Tokens
    output_tokens: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    loss_mask: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    behavior_logprobs: Logprobs = field(default_factory=lambda: np.empty(0, np.float32))
    version_spans: tuple[VersionSpan, ...] = ()
    finish_reason: FinishReason = "length"
    score: Score | None = None
    branch: int = 0
    tool_calls: tuple[ToolRecord, ...] = ()

    def __post_init__(self) -> None:
        spanned = sum(span.length for span in self.version_spans)
        lengths = {len(self.loss_mask), len(self.behavior_logprobs), spanned}
        if lengths != {len(self.output_tokens)}:
            raise ValueError(
                f"expected mask, log-probabilities and version spans of {len(self.output_tokens)} "
                f"output tokens, found lengths {sorted(lengths)}"
            )

    @property
    def tokens(self) -> Tokens:
        return np.concatenate((self.prompt_tokens, self.output_tokens))

    def with_completion(self, completion: Completion) -> TrajectoryDraft:
        """Append tokens that the policy sampled."""
        new = completion
        draft = self._with(new.tokens, True, new.logprobs, new.version_spans)
        return replace(draft, finish_reason=new.finish_reason)

    def with_environment(self, tokens: Sequence[int] | Tokens) -> TrajectoryDraft:
        """Append context, which is never trained, with the version of the token before it."""
        if not self.version_spans:
            raise ValueError("expected a completion before the environment's tokens, found none")
        version = self.version_spans[-1].version
        spans = (VersionSpan(version, len(tokens)),)
        logprobs = np.zeros(len(tokens), np.float32)
        return self._with(as_tokens(tokens), False, logprobs, spans)

    def with_calls(self, calls: Sequence[ToolRecord]) -> TrajectoryDraft:
        """Append calls of tools, whose results are tokens of the environment."""
        return replace(self, tool_calls=(*self.tool_calls, *calls))

    def as_branch(self, branch: int) -> TrajectoryDraft:
        """Return the start of another trajectory; only branch 0 trains the tokens so far."""
        mask = self.loss_mask if branch == 0 else np.zeros_like(self.loss_mask)
        return replace(self, branch=branch, loss_mask=mask)

    def scored(self, score: Score) -> TrajectoryDraft:
        return replace(self, score=score)

    def cut_by(self, limit: str) -> TrajectoryDraft:
        """Return the trajectory as truncated by a limit, which the score's message names."""
        score = self.score and replace(self.score, message=f"ended by {limit}")
        return replace(self, finish_reason="length", score=score)

    def _with(
        self,
        tokens: Tokens,
        is_sampled: bool,
        logprobs: Logprobs,
        spans: tuple[VersionSpan, ...],
    ) -> TrajectoryDraft:
        return replace(
            self,
            output_tokens=_joined(self.output_tokens, tokens),
            loss_mask=_joined(self.loss_mask, np.broadcast_to(is_sampled, len(tokens))),
            behavior_logprobs=_joined(self.behavior_logprobs, logprobs),
            version_spans=merged_spans(self.version_spans + spans),
        )


def _joined(left: NDArray[Any], right: NDArray[Any]) -> NDArray[Any]:
    """Concatenate two arrays; a first completion is not copied."""
    return np.concatenate((left, right)) if len(left) else right


class Workflow(Protocol):
    """Turns a prompt into trajectories, for one member of its group.

    It runs on the generator's event loop beside many others: it must not block or compute for long.
    """

    async def run(self, prompt: Prompt, context: EpisodeContext) -> Sequence[TrajectoryDraft]:
        """Return this member's trajectories: one per branch.

        Raises:
            Exception: stored as this member's failure; the other members continue.
        """


class TimedWorkflow(Settings):
    """A workflow whose episodes have a time limit."""

    episode_timeout_s: float = Field(600.0, gt=0)
    """Time limit of an episode, after which it ends with what it has."""

    @property
    def gives_rewards(self) -> bool:
        """Whether it scores its trajectories itself, so that no `[[rewards]]` are needed."""
        return False

    def time_limit(self, context: EpisodeContext) -> str:
        """Return the limit that ends an episode before its next turn; empty if none."""
        is_late = context.elapsed_s() >= self.episode_timeout_s
        return f"workflow.episode_timeout_s ({self.episode_timeout_s:g})" if is_late else ""


class EpisodeServices(Protocol):
    """What the worker of an episode provides."""

    sampling: Sampling
    max_model_len: int
    """Size of the policy's context, in tokens."""
    vocab_size: int
    is_chat: bool
    """Whether turns are rendered by a chat template."""

    async def generate(self, request: GroupRequest) -> Sequence[Completion]:
        """Complete one sequence of tokens, once per seed."""

    async def score(self, prompt: Prompt, completions: Sequence[Tokens]) -> Sequence[Score]:
        """Score completions of one prompt on a reward worker."""

    async def call_tool(self, path: str, calls: Sequence[tuple[Any, ...]]) -> Sequence[Any]:
        """Call a function on a reward worker; return what each call returned or raised."""

    async def new_sandbox(self, settings: SandboxSettings) -> Sandbox:
        """Return a sandbox on a reward worker; it is not started."""
        ...

    def next_turn(self, contents: Sequence[str], ended_by: int, role: str) -> Tokens:
        """Return the tokens of messages of a user or tools that follow an answer.

        Args:
            contents: of the messages.
            ended_by: the last token of the answer.
            role: `user` or `tool`.
        """
        ...

    def chat_calls(self, prompt: Tokens, answer: Tokens) -> Sequence[ToolCall]:
        """Return each call in an answer, in the chat template's format.

        Args:
            prompt: the conversation before the answer, which may have begun its reasoning.
        """
        ...

    def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        after: tuple[int, int] | None = None,
    ) -> Tokens:
        """Render messages by the chat template, up to where the policy answers; return tokens.

        Args:
            messages: each with `role` and `content`.
            tools: JSON schemas, which the template shows to the policy.
            after: index of an answer and the token that ended it (-1: none): only the tokens that
                follow this answer are returned.

        Raises:
            ValueError: the template refuses them, or rewrites earlier answers.
        """
        ...

    def conversation(self, prompt: Prompt) -> Sequence[Message]:
        """Return the messages that a prompt's tokens render by the chat template."""
        ...

    def encode(self, text: str) -> Tokens:
        """Return the tokens of a text of the environment, which may contain special tokens."""
        ...

    def decode(self, tokens: Tokens) -> str: ...


class Coalescer(Generic[Key, Item, Result]):
    """Sends the items of one key that arrive in one turn of the event loop as one request.

    A request is cancelled when nobody waits for it any more.
    """

    def __init__(self, send: Callable[[Key, list[Item]], Awaitable[Sequence[Result]]]) -> None:
        self._send = send
        self._open: dict[Key, tuple[dict[object, Item], asyncio.Task[dict[object, Result]]]] = {}

    async def ask(self, key: Key, item: Item) -> Result:
        """Return the result of an item, or raise what its request raised."""
        if key not in self._open:
            batch: dict[object, Item] = {}
            asyncio.get_running_loop().call_soon(self._open.pop, key)
            self._open[key] = batch, asyncio.create_task(self._request(key, batch))
        pending, request = self._open[key]
        item_id = object()
        pending[item_id] = item
        try:
            return (await asyncio.shield(request))[item_id]
        finally:
            del pending[item_id]
            if not pending:
                request.cancel()

    async def _request(self, key: Key, pending: dict[object, Item]) -> dict[object, Result]:
        sent = dict(pending)
        return dict(zip(sent, await self._send(key, [*sent.values()]), strict=True))


class RequestKey(NamedTuple):
    """What completions must have in common to become one request."""

    turn: int
    prefix: bytes
    """The tokens to complete."""
    max_new_tokens: int
    stop_strings: tuple[str, ...]


_REQUEST_NUMBERS = count()
"""Keep requests apart: an evaluation may roll out the same submission indices as training."""


class EpisodeContext:
    """What a workflow may do for one member: complete tokens, have them scored, call a tool."""

    def __init__(
        self,
        services: EpisodeServices,
        completions: Coalescer[RequestKey, tuple[int, OnToken | None], Completion],
        scores: Coalescer[None, Tokens, Score],
        tools: Coalescer[str, tuple[Any, ...], Any],
        seed: int,
    ) -> None:
        self._services = services
        self.sampling, self.is_chat = services.sampling, services.is_chat
        self.vocab_size = services.vocab_size
        self.chat, self.chat_calls = services.chat, services.chat_calls
        self.conversation, self.encode = services.conversation, services.encode
        self._completions = completions
        self._scores = scores
        self._tools = tools
        self._began = monotonic()
        self.seed = seed
        """Seed of this member, the same at every attempt."""

    async def generate(
        self,
        tokens: Sequence[int] | Tokens,
        turn: int,
        *,
        branch: int = 0,
        max_new_tokens: int | None = None,
        stop_strings: tuple[str, ...] = (),
        on_token: OnToken | None = None,
    ) -> Completion:
        """Return the policy's completion of `tokens`.

        Args:
            tokens: prompt and conversation so far, never tokenised again.
            turn: number of the completion in its conversation, from 0. The seed depends on turn
                and branch: two completions of a member must differ in one of them.
            max_new_tokens: of this completion, at most `generation.max_new_tokens`.
            stop_strings: of this completion, besides `generation.stop.strings`.
            on_token: called on the event loop with each token as it is sampled.

        Raises:
            ArealFlowError: the context, or `max_new_tokens`, has no room for one token.
            EngineError: the generator cannot serve; the whole group is retried.
        """
        if max_new_tokens is not None and max_new_tokens < 1:
            raise ArealFlowError(f"expected max_new_tokens of at least 1, found {max_new_tokens}")
        room = min(self._services.sampling.max_new_tokens, self.num_tokens_left(tokens))
        if room < 1:
            raise ArealFlowError(
                f"the conversation has {len(tokens)} tokens, expected fewer than "
                f"generation.max_model_len ({self._services.max_model_len})"
            )
        seed = turn_seed(self.seed, turn, branch)
        prefix = as_tokens(tokens).tobytes()
        key = RequestKey(turn, prefix, min(room, max_new_tokens or room), stop_strings)
        return await self._completions.ask(key, (seed, on_token))

    async def score(self, completion: Sequence[int] | Tokens) -> Score:
        """Return the score that the recipe's rewards give a completion, on a reward worker.

        Raises:
            RewardError: no reward worker is available. A verifier's error is in the score instead.
        """
        return await self._scores.ask(None, as_tokens(completion))

    async def call_tool(self, path: str, *arguments: Any) -> Any:
        """Call the function `package.module:function` on a reward worker, and return its result.

        Raises:
            ArealFlowError: there is no such function; or whatever the function raises.
        """
        result = await self._tools.ask(path, arguments)
        if isinstance(result, Exception):
            raise result
        return result

    @asynccontextmanager
    async def sandbox(self, settings: SandboxSettings) -> AsyncIterator[Sandbox]:
        """Have a sandbox on a reward worker until the end of the block.

        Raises:
            SandboxError: there is none, or it was lost: the member has no reward.
        """
        async with opened(await self._services.new_sandbox(settings)) as sandbox:
            yield sandbox

    def elapsed_s(self) -> float:
        return monotonic() - self._began

    def num_tokens_left(self, tokens: Sequence[int] | Tokens) -> int:
        """Return how many more tokens the context has room for."""
        return self._services.max_model_len - len(tokens)

    def user_turn(self, content: str, *, after: Sequence[int] | Tokens) -> Tokens:
        """Return the tokens of a user's message, up to where the policy continues.

        Args:
            content: tokenised as it is or, with a chat template, rendered by it.
            after: the conversation so far, which ends with a completion; append the result to it.

        Raises:
            ValueError: the chat template rewrites earlier answers.
        """
        return self._services.next_turn([content], int(after[-1]), "user")

    def tool_turn(self, *contents: str, after: Sequence[int] | Tokens) -> Tokens:
        """Return the tokens of tool results, a message for each call; see `user_turn`."""
        return self._services.next_turn(contents, int(after[-1]), "tool")

    def decode(self, tokens: Sequence[int] | Tokens) -> str:
        """Return text without special tokens."""
        return self._services.decode(as_tokens(tokens))


def contexts_of(episode: Episode, services: EpisodeServices) -> list[EpisodeContext]:
    """Return a context for each member of a group."""

    async def generate(
        key: RequestKey, members: Sequence[tuple[int, OnToken | None]]
    ) -> Sequence[Completion]:
        seeds, listeners = zip(*members, strict=True)
        tokens = np.frombuffer(key.prefix, np.int32)
        sampling = replace(services.sampling, **episode.sampling)
        stop_strings = sampling.stop_strings + key.stop_strings
        sampling = replace(sampling, max_new_tokens=key.max_new_tokens, stop_strings=stop_strings)
        name = f"{episode.group_id}.{episode.attempt}.{next(_REQUEST_NUMBERS)}"
        on_token = _on_event_loop(listeners) if any(listeners) else None
        return await services.generate(GroupRequest(name, tokens, seeds, sampling, on_token))

    async def score(_: None, completions: Sequence[Tokens]) -> Sequence[Score]:
        return await services.score(episode.prompt, completions)

    shared = Coalescer(generate), Coalescer(score), Coalescer(services.call_tool)
    return [EpisodeContext(services, *shared, seed) for seed in episode.seeds]


def _on_event_loop(listeners: Sequence[OnToken | None]) -> Callable[[int, int], None]:
    """Return a callback that passes tokens from the engine's thread to the listening members."""
    loop = asyncio.get_running_loop()

    def on_token(index: int, token: int) -> None:
        if listener := listeners[index]:
            loop.call_soon_threadsafe(listener, token)

    return on_token


def turn_seed(member_seed: int, turn: int, branch: int = 0) -> int:
    """Return the seed of one completion: that of the member for its first turn and branch."""
    return counter_seed(member_seed, turn, branch) if turn or branch else member_seed


@dataclass(frozen=True, slots=True, eq=False)
class RolledOutGroup:
    """The drafts of a group's members."""

    drafts: tuple[tuple[int, TrajectoryDraft], ...]
    """Each with the number of its member; every member has at least one."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Why members failed."""
        failed = (draft.score for _, draft in self.drafts if draft.finish_reason == "error")
        return tuple(score.error for score in failed if score)

    @property
    def has_failed(self) -> bool:
        """Whether every member failed."""
        return len(self.errors) == len(self.drafts)


async def run_group(
    workflow: Workflow, episode: Episode, services: EpisodeServices
) -> RolledOutGroup:
    """Run a workflow for all members of a group, side by side."""
    contexts = contexts_of(episode, services)
    outcomes = await all_of(_run_member(workflow, episode, context) for context in contexts)
    return RolledOutGroup(
        tuple((member, draft) for member, outcome in enumerate(outcomes) for draft in outcome)
    )


async def _run_member(
    workflow: Workflow, episode: Episode, context: EpisodeContext
) -> Sequence[TrajectoryDraft]:
    try:
        drafts = await workflow.run(episode.prompt, context)
        branches = [draft.branch for draft in drafts]
        if not branches or len(set(branches)) != len(branches):
            raise ArealFlowError(
                f"expected trajectories of different branches, found branches {branches}"
            )
        if not all(draft.loss_mask.any() for draft in drafts):
            raise ArealFlowError("expected a completion in each trajectory, found none in one")
        return drafts
    except (EngineError, WeightsError):
        raise
    except Exception as error:  # noqa: BLE001 - counted, and stored with its group
        FAILURES.note(error)
        score = Score(None, "error", error=cause_of(error))
        return [TrajectoryDraft(episode.prompt.tokens, finish_reason="error", score=score)]
