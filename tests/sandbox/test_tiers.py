"""The chosen tier if the kernel refuses namespaces, Landlock or both."""

from __future__ import annotations

import subprocess
import sys

import pytest

from areal_flow.sandboxes.inside import kernel
from areal_flow.sandboxes.pool import choose_tier
from areal_flow.sandboxes.run import SandboxError, available_tiers

REFUSED = {"namespaces": (272, 97), "landlock": (444, 444)}
"""The numbers of `unshare` and `landlock_create_ruleset`, without which there is no such tier."""
CHOOSE = """
import struct, sys
from areal_flow.sandboxes.inside import kernel
from areal_flow.sandboxes.run import SandboxError
from areal_flow.sandboxes.pool import choose_tier
program = [(0x20, 0, 0, 0)]
for number in map(int, sys.argv[1:]):
    program += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
program.append((0x06, 0, 0, 0x7FFF0000))
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
kernel.install_filter(b"".join(struct.pack("HBBI", *step) for step in program))
try:
    print(choose_tier())
except SandboxError as error:
    print("refused:", error)
"""


def has(tier: str) -> bool:
    try:
        return choose_tier((tier,)) == tier
    except SandboxError:
        return False


@pytest.mark.parametrize("missing", [(), ("namespaces",), ("landlock",), available_tiers()])
def test_strongest_tier_that_is_left_is_chosen_or_none(missing: tuple[str, ...]) -> None:
    left = [tier for tier in available_tiers() if tier not in missing and has(tier)]
    if kernel.MACHINE not in kernel.MACHINES:
        pytest.skip("no numbers of system calls for this machine")
    numbers = [str(REFUSED[tier][kernel.column()]) for tier in missing]
    done = subprocess.run(
        [sys.executable, "-c", CHOOSE, *numbers], capture_output=True, text=True, check=True
    )
    output = done.stdout.strip()
    if left:
        assert output == left[0]
    else:
        assert output.startswith("refused: model-written code is not run here")
        assert all(tier in output for tier in available_tiers())
