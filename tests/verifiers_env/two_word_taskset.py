"""A tiny environment: the longer the answer, the better."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf

__all__ = ["Words"]


class WordsTask(vf.Task[vf.TaskData]):
    """Asks for words."""

    @vf.reward
    async def has_words(self, trace: vf.Trace) -> float:
        """Return the number of words of the answer."""
        if trace.task.data.prompt == "fail":
            raise KeyError("the environment's own")
        return float(len(trace.last_reply.split()))


class Words(vf.Taskset[WordsTask]):
    """Two tasks that can be played, and one whose reward fails."""

    def load(self) -> Iterable[WordsTask]:
        """Yield them."""
        for prompt in ("say one", "say two", "fail"):
            yield WordsTask(vf.TaskData(prompt=prompt))
