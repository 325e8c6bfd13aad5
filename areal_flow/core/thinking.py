"""What encloses thinking in a text, and the answer behind it."""

from __future__ import annotations

BEGIN, END = "<think>", "</think>"


def after_thinking(completion: str, prompt: str = "") -> str:
    """Return what follows the thinking; nothing if a completion ends while it thinks.

    Args:
        prompt: chat templates may end it with the tag that begins the thinking.
    """
    _, end, answer = completion.rpartition(END)
    if BEGIN in answer or (not end and prompt.rstrip().endswith(BEGIN)):
        return ""
    return answer
