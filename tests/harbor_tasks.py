"""Writes tasks in Harbor's format, each a folder."""

from __future__ import annotations

from pathlib import Path

CONFIG = """
schema_version = "1.1"
[task]
name = "tests/{name}"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 30.0
[verifier]
timeout_sec = 20.0
env = {{ EXPECTED = "{expected}" }}
[environment]
memory_mb = 256
storage_mb = 64
"""
DOCKERFILE = """
FROM localhost/areal-flow-test:1
WORKDIR /app
ENV NUMBERS=numbers.txt
COPY numbers.txt lib/ /app/
"""
TEST = """#!/bin/bash
written=$(cat /app/answer.txt 2>/dev/null)
echo "the answer is $written, expected $EXPECTED"
if [ "$written" = "$EXPECTED" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""
SOLUTION = """#!/bin/bash
python3 sums.py < "$NUMBERS" > answer.txt
"""
SUMS = "import sys\nprint(sum(map(int, sys.stdin)))\n"


def write_task(
    folder: Path,
    *,
    expected: int = 42,
    solution: str = SOLUTION,
    test: str = TEST,
    config: str = "",
    dockerfile: str = DOCKERFILE,
) -> Path:
    """Write a task: add up the numbers of a file."""
    files = {
        "task.toml": CONFIG.format(name=folder.name, expected=expected) + config,
        "instruction.md": "Write the sum of the numbers in /app/numbers.txt to /app/answer.txt.\n",
        "environment/Dockerfile": dockerfile,
        "environment/numbers.txt": f"{expected - 20}\n20\n",
        "environment/lib/sums.py": SUMS,
        "tests/test.sh": test,
        "solution/solve.sh": solution,
    }
    for name, text in files.items():
        if text:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
    return folder
