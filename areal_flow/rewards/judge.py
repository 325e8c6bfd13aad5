"""The reward `judge`: an HTTP service that scores completions.

Without a `model` the service gets `{"prompt", "completion", "answer", "metadata"}` as JSON and
returns `{"score": x}`, optionally with `"detail"`. With a model the service is an OpenAI-compatible
`chat/completions`, which is prompted for a number. An unreachable service gives no score.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from areal_flow.core.errors import RewardError
from areal_flow.core.types import Score, answer_text
from areal_flow.rewards.protocol import RewardInput, overlong

if TYPE_CHECKING:
    from aiohttp import ClientSession

QUESTION = """Question:
{prompt}

Reference answer:
{answer}

Answer to judge:
{completion}

How good is the answer to judge, from 0 (wrong) to 1 (right)? End with a line "Score: x"."""
TRANSIENT_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses that are retried."""
FIRST_WAIT_S = 0.5
_SCORE = re.compile(
    r"Score\**:[\s*]*([-+]?(?:\d+(?:\.\d*)?|\.\d+))(?![\d/%eE]|[.,]\d)(?! of\b)", re.IGNORECASE
)
_PLACE = re.compile(r"\{(prompt|answer|completion)\}")


class JudgeReward:
    def __init__(
        self,
        *,
        url: str,
        model: str = "",
        question: str = QUESTION,
        key_variable: str = "",
        num_retries: int = 3,
        max_concurrency: int = 16,
        limit_s: float = 60.0,
        scale: Sequence[float] | None = None,
    ) -> None:
        """Configure the service.

        Args:
            url: `http(s)://...`; with a model, up to and including `/v1`.
            model: the name of a model of an OpenAI-compatible service.
            question: the message to the model, with {prompt}, {answer} and {completion}.
            key_variable: the environment variable with the API key.
            num_retries: after a transient failure; the wait doubles, from half a second.
            max_concurrency: concurrent requests of one reward worker.
            limit_s: time limit of one request.
            scale: minimum and maximum score; a score outside is an error. Default: 0 to 1 with a
                model, any number without.
        """
        if not url.startswith(("http://", "https://")):
            raise RewardError(f"reward 'judge': expected url = 'http(s)://...', found {url!r}")
        if num_retries < 0 or max_concurrency < 1 or limit_s <= 0:
            raise RewardError(
                "reward 'judge': expected num_retries >= 0, max_concurrency >= 1 and limit_s > 0, "
                f"found {num_retries}, {max_concurrency} and {limit_s:g}"
            )
        if scale is not None and not _is_range(scale):
            raise RewardError(
                f"reward 'judge': expected scale = [lowest, highest], two numbers, found {scale}"
            )
        bounds: Sequence[float] = (0, 1) if model else (-math.inf, math.inf)
        self._lowest, self._highest = scale or bounds
        self._url = url.rstrip("/") + ("/chat/completions" if model else "")
        self._model, self._question = model, question
        self._key_variable = key_variable
        self._num_retries, self._limit_s = num_retries, limit_s
        self.max_concurrency = max_concurrency

    def open(self) -> None:
        self._headers = {}
        self._turns = asyncio.Semaphore(self.max_concurrency)
        if self._key_variable:
            if not (key := os.environ.get(self._key_variable)):
                raise RewardError(
                    f"reward 'judge': expected a key in the environment variable "
                    f"{self._key_variable}, found none: set it where the run is started"
                )
            self._headers = {"Authorization": f"Bearer {key}"}

    def close(self) -> None: ...

    async def score(self, inputs: Sequence[RewardInput]) -> Sequence[Score]:
        import aiohttp

        limit = aiohttp.ClientTimeout(self._limit_s)
        async with aiohttp.ClientSession(timeout=limit, headers=self._headers) as session:
            return await asyncio.gather(*(self._score(session, item) for item in inputs))

    async def _score(self, session: ClientSession, item: RewardInput) -> Score:
        if score := overlong(item.completion):
            return score
        try:
            async with self._turns:
                return self._read(await self._post(session, self._request(item)))
        except ServiceError as error:
            return Score(None, "infrastructure_error", error=str(error))

    def _request(self, item: RewardInput) -> dict[str, Any]:
        texts = {"prompt": item.prompt, "completion": item.completion}
        if not self._model:
            return {**texts, "answer": item.answer, "metadata": dict(item.metadata)}
        texts["answer"] = answer_text(item.answer)
        question = _PLACE.sub(lambda place: texts[place[1]], self._question)
        messages = [{"role": "user", "content": question}]
        return {"model": self._model, "messages": messages, "temperature": 0}

    async def _post(self, session: ClientSession, request: dict[str, Any]) -> Any:
        import aiohttp

        failure = ""
        for attempt in range(self._num_retries + 1):
            await asyncio.sleep(FIRST_WAIT_S * 2 ** (attempt - 1) if attempt else 0.0)
            try:
                async with session.post(self._url, json=request) as response:
                    if response.status == 200:
                        return await response.json(content_type=None)
                    failure = f"status {response.status}: {(await response.text())[:200]}"
                    if response.status not in TRANSIENT_STATUSES:
                        break
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                failure = f"{type(error).__name__}: {error}"
        raise ServiceError(f"{self._url}: {failure}")

    def _read(self, response: Any) -> Score:
        try:
            if self._model:
                text = response["choices"][0]["message"]["content"]
                score, message = float(_SCORE.findall(text)[-1]), text[-200:]
            else:
                score, message = float(response["score"]), str(response.get("detail", ""))
        except (TypeError, KeyError, IndexError, ValueError) as error:
            raise ServiceError(f"{self._url}: no score in {str(response)[:200]!r}") from error
        if not (math.isfinite(score) and self._lowest <= score <= self._highest):
            scale = f"expected a score from {self._lowest:g} to {self._highest:g}, found {score:g}"
            return Score(None, "error", error=f"{self._url}: {scale}: see `scale`", message=message)
        return Score(score, message=message)


def _is_range(scale: Any) -> bool:
    is_pair = isinstance(scale, list | tuple) and len(scale) == 2
    is_finite = is_pair and all(isinstance(x, int | float) and math.isfinite(x) for x in scale)
    return is_finite and scale[0] < scale[1]


class ServiceError(Exception):
    """A judge gave no score."""
