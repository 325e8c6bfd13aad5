"""A long run that is killed again and again: what grows with it, besides its log.

A policy that costs nothing is trained in the background, with `nohup` and in a session of its own.
Its driver is killed (`kill -9`) every so many steps, and the run is resumed. Meanwhile memory,
descriptors and threads of its processes are read, and the files that it leaves: in its directory,
beside it, in the folder for temporary files and in shared memory. At the end its log is audited
and its report written. Linux only.

Memory is the proportional set size, in MB. Growth is the slope of a line, per 1,000 steps: in lives
of drivers, the mean of the slopes of their second halves; and over lives, of their means, without
the first, which prepares the run. An error is twice the standard error. A value grows if its growth
exceeds that by more than a tolerance; in lives, only where they are of 1,000 steps or more.

    python -m benchmarks.soak [--steps 5000] [--kill-every 250] [--minutes M] [--tiny] [--json FILE]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, sqrt
from pathlib import Path
from statistics import fmean, stdev
from time import monotonic, sleep
from typing import Any

import numpy as np
import psutil

from areal_flow.core.layout import RunLayout
from areal_flow.policy.weights.shared_memory import segments_of
from benchmarks import harness
from benchmarks.overhead import ROLES, role_of, settings_of

NAME = "soak"
SIZES = {"tokens": 4, "group_size": 2, "batch_size": 8}
TINY = {"num_steps": 60, "kill_every": 20}
SAMPLE_EVERY_STEPS = 5
MIN_LIVES, MIN_LIFE, WARM_UP = 4, 100, 500
"""With fewer lives, or steps in each, nothing is judged. Growth in lives is judged if their second
halves begin after so many steps: until then caches, pools and threads come into being."""
TOLERANCE = {"memory_mb": 2.0, "descriptors": 0.5, "threads": 0.5, "files": 1.0}
"""Per 1,000 steps, of a process or a folder."""
LOG = ("trajectories.lance", "steps.lance")
OTHER = "other"
"""The role of the process that forks workers."""

Sample = Mapping[str, float]


@dataclass
class Life:
    """One driver, from its start to its end."""

    first_step: int
    last_step: int = 0
    start_s: float = 0.0
    """Until its first step."""
    training_s: float = 0.0
    """From then on."""
    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    """By role, and by folder."""


@dataclass
class Growth:
    """A value's growth in 1,000 steps."""

    slope: float
    error: float

    def exceeds(self, tolerance: float) -> bool:
        return self.slope - self.error > tolerance

    def __str__(self) -> str:
        return f"{self.slope:+.2f} ± {self.error:.2f}"


@dataclass
class Soak:
    cwd: Path
    settings: Mapping[str, object]
    num_steps: int
    kill_every: int
    until: float
    """When the last driver is stopped, before it has trained all steps."""
    lives: list[Life] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = RunLayout(self.cwd / "runs" / NAME)
        self.temporary = self.cwd / "temporary"
        self.temporary.mkdir()

    def survive(self) -> None:
        """Train, kill and resume until all steps are trained, or time is up."""
        while not self.lives or (
            self.lives[-1].last_step < self.num_steps and monotonic() < self.until
        ):
            self.lives.append(Life(max(0, harness.newest_step(self.cwd, NAME))))
            self._live(self.lives[-1])

    def _live(self, life: Life) -> None:
        """Start a driver, and kill it after so many steps; the last one ends by itself."""
        given = ["--resume", NAME] if life.first_step else harness.flags(self.settings)
        log, until = self.cwd / harness.DRIVER_LOG, life.first_step + self.kill_every
        began = first_step_at = monotonic()
        with log.open("a") as output:
            driver = subprocess.Popen(
                ["nohup", *harness.CLI, "train", *given],
                cwd=self.cwd,
                env=harness.environment(TMPDIR=str(self.temporary)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        sampled, is_stopped = life.first_step, False
        while driver.poll() is None:
            head = harness.newest_step(self.cwd, NAME)
            if head <= life.first_step:
                first_step_at = monotonic()
            if head >= sampled + SAMPLE_EVERY_STEPS:
                sampled = head
                self._sample(life, driver.pid, head)
            if monotonic() > self.until:
                if not is_stopped:
                    driver.terminate()
                is_stopped = True
            elif until <= head and until < self.num_steps:
                harness.kill_with_workers(driver)
            sleep(0.1)
        life.start_s, life.training_s = first_step_at - began, monotonic() - first_step_at
        life.last_step = harness.newest_step(self.cwd, NAME)
        if life.last_step < min(until, self.num_steps) and not is_stopped:
            sys.exit(f"the driver ended at step {life.last_step}:\n{log.read_text()[-5000:]}")

    def _sample(self, life: Life, driver: int, step: int) -> None:
        for name, sample in {**read_processes(driver), **self.read_files()}.items():
            life.samples[name].append({"step": step, **sample})

    def read_files(self) -> dict[str, Sample]:
        """Return number and size of the files in each folder of the run, and in those beside it."""
        folders = defaultdict(list, {"temporary files": [self.temporary]})
        for entry in self.layout.root.iterdir():
            folders[entry.name if entry.is_dir() else "other files of the run"].append(entry)
        folders["trackers"] = [e for e in self.layout.root.parent.iterdir() if e.name != NAME]
        segments = segments_of(self.layout.weights_of(0))
        prefix = segments.name.removesuffix("00000000")
        folders["shared memory"] = [*segments.parent.glob(f"{prefix}*")]
        sizes = {name: [*file_sizes(entries)] for name, entries in folders.items()}
        return {name: {"files": len(each), "mb": sum(each) / 1e6} for name, each in sizes.items()}

    def values(self, name: str, value: str) -> list[list[tuple[float, float]]]:
        """Return steps and values of each life."""
        return [
            [(sample["step"], sample[value]) for sample in life.samples[name]]
            for life in self.lives
            if life.samples[name]
        ]


def read_processes(driver: int) -> dict[str, Sample]:
    """Return what each role uses; nothing if a process has just ended."""
    used: dict[str, dict[str, float]] = {}
    try:
        process = psutil.Process(driver)
        members = [(role_of(p), p) for p in process.children(recursive=True)]
        for role, member in [("driver", process), *members]:
            total = used.setdefault(role, dict.fromkeys(("memory_mb", "descriptors", "threads"), 0))
            total["memory_mb"] += member.memory_full_info().pss / 1e6
            total["descriptors"] += member.num_fds()
            total["threads"] += member.num_threads()
    except psutil.Error:
        return {}
    return dict(used)


def file_sizes(entries: Sequence[Path]) -> Iterator[int]:
    """Yield the size of each file; links are not followed."""
    for entry in entries:
        paths = [Path(folder) / name for folder, _, names in os.walk(entry) for name in names]
        for path in paths or [entry] * entry.is_file():
            try:
                yield path.lstat().st_size
            except FileNotFoundError:  # deleted meanwhile
                continue


def growth_in_lives(lives: Sequence[Sequence[tuple[float, float]]]) -> Growth:
    """Return the mean slope of the second halves of lives, with its error from their spread."""
    slopes = [slope(life[len(life) // 2 :])[0] for life in lives if len(life) >= 6]
    error = 2 * stdev(slopes) / sqrt(len(slopes)) if len(slopes) > 1 else 0.0
    return Growth(fmean(slopes) if slopes else 0.0, error)


def growth_over_lives(lives: Sequence[Sequence[tuple[float, float]]]) -> Growth:
    """Return the slope of the means of lives, without the first, which prepares the run."""
    means = [tuple(np.mean(life, axis=0)) for life in lives[1:]]
    return Growth(*slope(means))


def slope(points: Sequence[tuple[float, ...]]) -> tuple[float, float]:
    """Fit a line to steps and values; return its slope in 1,000 steps, and twice its error."""
    if len(points) < 3:
        return 0.0, 0.0
    steps, values = np.array(points).T
    steps = (steps - steps.mean()) / 1000
    squares = float(steps @ steps)
    fitted = float(steps @ values) / squares
    rest = values - values.mean() - fitted * steps
    return fitted, 2 * sqrt(float(rest @ rest) / (len(points) - 2) / squares)


def table_of_processes(soak: Soak) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each role, and what grows."""
    rows, growing = list[dict[str, Any]](), list[str]()
    for role in (*ROLES, OTHER):
        row: dict[str, Any] = {"process": role}
        for value in ("memory_mb", "descriptors", "threads"):
            lives = soak.values(role, value)
            growths = growth_in_lives(lives), growth_over_lives(lives)
            row[value] = fmean(number for life in lives for _, number in life)
            row |= zip((f"{value} in lives", f"{value} over lives"), map(str, growths), strict=True)
            judged = growths if soak.kill_every >= 2 * WARM_UP else growths[1:]
            if any(growth.exceeds(TOLERANCE[value]) for growth in judged):
                growing.append(f"{value} of {role}")
        rows.append(row)
    return rows, growing


def table_of_files(soak: Soak) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a row for each folder, and those whose files become more; the log may grow."""
    rows, growing = list[dict[str, Any]](), list[str]()
    for folder, at_the_end in sorted(soak.read_files().items()):
        files = growth_over_lives(soak.values(folder, "files"))
        row: dict[str, Any] = {"folder": folder, "files": at_the_end["files"]}
        row |= {"files over lives": str(files), "mb": at_the_end["mb"]}
        rows.append(row | {"mb over lives": str(growth_over_lives(soak.values(folder, "mb")))})
        leases = 1000 / soak.kill_every if folder == "writers" else 0.0
        if folder not in LOG and files.exceeds(leases + TOLERANCE["files"]):
            growing.append(f"files in {folder}")
    return rows, growing


def table_of_lives(soak: Soak) -> list[dict[str, Any]]:
    """Return the first and the last lives."""
    rows = [
        {
            "life": number,
            "steps": f"{life.first_step} to {life.last_step}",
            "start_s": life.start_s,
            "ms_a_step": 1000 * life.training_s / max(1, life.last_step - life.first_step),
        }
        for number, life in enumerate(soak.lives, 1)
    ]
    return rows if len(rows) <= 6 else rows[:3] + rows[-3:]


def run_soak(
    cwd: Path, *, num_steps: int, kill_every: int, limit_s: float = inf
) -> dict[str, list[dict[str, Any]]]:
    """Return tables by title; the last is the verdict."""
    settings = settings_of(cwd, Namespace(**SIZES, steps=num_steps))
    settings |= {"name": NAME, "trainer.checkpoint-every-steps": min(20, kill_every // 2)}
    soak = Soak(cwd, settings, num_steps, kill_every, monotonic() + limit_s)
    soak.survive()
    (processes, growing), (files, leftovers) = table_of_processes(soak), table_of_files(soak)
    is_judged = len(soak.lives) >= MIN_LIVES and kill_every >= MIN_LIFE
    verdict = {
        "steps": soak.lives[-1].last_step,
        "kills": len(soak.lives) - 1,
        "check": call("check", cwd).splitlines()[-1].partition(". ")[0].strip(),
        "report": describe_report(cwd, soak.layout.report),
        "grows": ", ".join([*growing, *leftovers]) if is_judged else "not judged: too short",
    }
    verdict["grows"] = verdict["grows"] or "nothing but the log"
    lives = table_of_lives(soak)
    return {"Processes": processes, "Files": files, "Lives": lives, "Verdict": [verdict]}


def call(command: str, cwd: Path) -> str:
    """Return what a command prints of the run, whether or not it fails."""
    done = subprocess.run(
        [*harness.CLI, command, NAME],
        cwd=cwd,
        env=harness.environment(),
        capture_output=True,
        text=True,
    )
    return done.stdout or done.stderr


def describe_report(cwd: Path, page: Path) -> str:
    """Write the report again, and return its size."""
    call("report", cwd)
    html = page.read_text()
    if not html.rstrip().endswith("</html>"):
        sys.exit(f"expected a complete page in {page}, found one that ends in {html[-50:]!r}")
    return f"{len(html) / 1e6:.1f} MB"


def main() -> None:
    chosen = harness.parse_options(
        __doc__, steps=5000, kill_every=250, minutes=float, tiny=False, markdown=Path
    )
    sizes = TINY if chosen.tiny else {"num_steps": chosen.steps, "kill_every": chosen.kill_every}
    with tempfile.TemporaryDirectory(prefix="areal-flow-soak-") as scratch:
        tables = run_soak(Path(scratch), **sizes, limit_s=60 * (chosen.minutes or inf))
    if chosen.markdown:
        chosen.markdown.write_text(harness.markdown(tables) + "\n")
    harness.report(chosen.json, tables)


if __name__ == "__main__":
    main()
