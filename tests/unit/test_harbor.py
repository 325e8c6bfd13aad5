"""Tasks in Harbor's format: what is read, refused, judged, and tried before a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from areal_flow.sandboxes.harbor import HarborTask, TaskError, TestResult, ship_task, task_folders
from areal_flow.sandboxes.registry import SandboxSettings
from pipelines.cli.main import main
from tests.contracts.test_sandboxes import IMAGE, PODMAN, skip_without
from tests.harbor_tasks import DOCKERFILE, write_task

LOCAL = SandboxSettings()
READS_ITS_REWARD = """cat > ~/.bashrc <<'E'
case "$1" in */reward.*) printf '%s1%s' "$0" "$0"; exit; esac
E
"""
"""For a bash that reads a file by its marks."""
IN_PATH = "for p in ${PATH//:/ }; do mkdir -p $p; cp /tmp/fake $p/bash; cp /tmp/fake $p/cat; done"
FAKE = "printf '#!/bin/sh\\necho 42\\n' > /tmp/fake; chmod +x /tmp/fake"


async def judged(task: HarborTask, *commands: str, base: SandboxSettings = LOCAL) -> TestResult:
    async with task.opened(base) as sandbox:
        for command in commands:
            await sandbox.run(command, timeout_s=10)
        return await task.judge(sandbox)


def test_task_is_read_with_its_limits_and_environment(tmp_path: Path) -> None:
    task = HarborTask(write_task(tmp_path / "sum"))
    assert task.instruction.startswith("Write the sum of the numbers")
    assert task.agent_timeout_s == 30
    settings = task.settings(SandboxSettings(variables={"A": "b"}))
    assert (settings.memory_bytes, settings.disk_bytes) == (256 * 2**20, 64 * 2**20)
    assert settings.workdir == "/app"
    assert settings.variables == {"A": "b", "NUMBERS": "numbers.txt"}
    container = task.settings(SandboxSettings(provider="docker"))
    assert container.image == str(tmp_path / "sum" / "environment")


async def test_tests_reward_what_was_done_in_the_environment(tmp_path: Path) -> None:
    task = HarborTask(write_task(tmp_path / "sum"))
    solved = await judged(
        task, "cat numbers.txt sums.py", 'python3 sums.py <"$NUMBERS" >answer.txt'
    )
    assert (solved.reward, solved.output) == (1.0, "the answer is 42, expected 42\n")
    assert (await judged(task)).reward == 0
    assert (await judged(task, "echo 41 > answer.txt")).reward == 0


@pytest.mark.parametrize(
    "attack",
    [
        "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt",
        "mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
        "mkdir -p /logs; ln -s /app /logs/verifier; echo 1 > /app/reward.txt",
        "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh",
        "cat() { echo 42; }; export -f cat; export EXPECTED=",
        "(while :; do echo 1 2>/dev/null > /logs/verifier/reward.json; done) >/dev/null 2>&1 &",
        "alias env=true; env() { :; }; rm() { :; }; tar() { :; }",
        READS_ITS_REWARD,
        f"{FAKE}; rm /bin; mkdir /bin; cp /tmp/fake /bin/bash; cp /tmp/fake /bin/cat",
        f"{FAKE}; mv /root /root2; {IN_PATH}",
        "echo /tmp/evil.so > /etc/ld.so.preload",
        "mv /etc /etc2; mkdir /etc; echo x > /etc/ld.so.preload",
    ],
)
async def test_what_an_episode_left_behind_does_not_reward_it(tmp_path: Path, attack: str) -> None:
    result = await judged(HarborTask(write_task(tmp_path / "sum")), attack)
    assert result.reward == 0
    assert "expected 42" in result.output


async def test_tests_do_not_import_what_an_episode_left_in_its_home(tmp_path: Path) -> None:
    test = "#!/bin/bash\npython3 -c 'print(0)' > /logs/verifier/reward.txt\n"
    site = "$(python3 -m site --user-site)"
    attack = f'mkdir -p {site}; echo "print(1); import os; os._exit(0)" > {site}/usercustomize.py'
    result = await judged(HarborTask(write_task(tmp_path / "t", test=test)), attack)
    assert (result.reward, result.rewards) == (0, {"reward": 0})


@pytest.mark.parametrize(
    "harm",
    [
        *("chmod 000 /", "chmod 555 /; touch /app/a", "touch /logs", "ln -s /nowhere/x /logs"),
        *("mkdir /logs; chmod 000 /logs", "rm -rf /app; touch /app", "chmod 000 /app"),
        *("rm -rf /tmp; touch /tmp", "chmod 000 /tmp", "yes | head -c 1G > /app/full"),
        'echo \'{"\\ud800": 1, "reward": 1}\' > /app/r; exit 1',
    ],
)
async def test_an_episode_that_harms_its_sandbox_gets_0_and_is_not_discarded(
    tmp_path: Path, harm: str
) -> None:
    result = await judged(HarborTask(write_task(tmp_path / "sum")), harm)
    assert result.reward == 0


@pytest.mark.parametrize(
    ("written", "reward", "rewards"),
    [
        ("echo 0.5 > /logs/verifier/reward.txt", 0.5, {"reward": 0.5}),
        (
            'echo \'{"reward": 0.25, "style": 1}\' > /logs/verifier/reward.json',
            0.25,
            {"reward": 0.25, "style": 1},
        ),
        ("echo '{\"style\": 1}' > /logs/verifier/reward.json", 1, {"style": 1}),
        ("echo 0 > /logs/verifier/reward.txt; exit 3", 0, {"reward": 0}),
    ],
)
async def test_rewards_may_be_a_number_or_several(
    tmp_path: Path, written: str, reward: float, rewards: Mapping[str, float]
) -> None:
    result = await judged(HarborTask(write_task(tmp_path / "t", test=f"#!/bin/bash\n{written}\n")))
    assert (result.reward, result.rewards) == (reward, rewards)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("true", "there is neither reward.txt nor reward.json"),
        ("echo nan > /logs/verifier/reward.txt", "expected numbers up to"),
        ("echo 1e308 > /logs/verifier/reward.txt", "expected numbers up to"),
        ("printf '[%.0s' {1..60000} > /logs/verifier/reward.json", "recursion"),
        ("head -c 100000 /dev/urandom > /logs/verifier/reward.txt", "at most 65,536 bytes"),
        ('echo \'{"reward": 1, "\\ud800": 1}\' > /logs/verifier/reward.json', "by name"),
        ("echo yes > /logs/verifier/reward.txt", "could not convert"),
        ('echo \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json', "expected 'reward' among a, b"),
        ("sleep 60", "not done within 1 s"),
    ],
)
async def test_tests_without_a_result_reward_nothing(
    tmp_path: Path, written: str, reason: str
) -> None:
    folder = write_task(tmp_path / "t", test=f"#!/bin/bash\n{written}\n")
    config = (folder / "task.toml").read_text().replace("timeout_sec = 20.0", "timeout_sec = 1.0")
    (folder / "task.toml").write_text(config)
    result = await judged(HarborTask(folder))
    assert result.reward == 0
    assert reason in result.output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"test": ""}, r"it has no tests/test\.sh, which gives the reward"),
        ({"config": "gpus = 1\n"}, r"task\.toml: environment\.gpus: GPUs are not supported"),
        ({"config": 'os = "windows"\n'}, r"environment\.os: only linux is supported"),
        ({"config": '[[steps]]\nname = "a"\n'}, r"task\.toml: steps: several steps are not"),
        ({"config": "[environment]\n"}, r"task\.toml: .*environment"),
        ({"config": "env = { 'A B' = '1' }\n"}, r"task\.toml: "),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, changes: dict[str, str], message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        HarborTask(write_task(tmp_path / "t", **changes))


@pytest.mark.parametrize(
    "line",
    [
        *("RUN apt-get update", "COPY --from=base /a /b", "ADD a b", "ENV PATH=/a:$PATH"),
        *("WORKDIR $HOME", "COPY numbers.txt /etc/n", "FROM b", "ENV 'a"),
    ],
)
def test_a_dockerfile_that_does_more_than_copy_needs_a_container(tmp_path: Path, line: str) -> None:
    task = HarborTask(write_task(tmp_path / "t", dockerfile=f"{DOCKERFILE}\n{line}\n"))
    with pytest.raises(TaskError, match=r"Dockerfile: .* needs a container: set workflow"):
        task.settings(LOCAL)
    assert task.settings(SandboxSettings(provider="docker")).image


def test_files_outside_the_environment_are_not_copied(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s")
    task = HarborTask(write_task(tmp_path / "t", dockerfile="FROM a\nCOPY ../../secret /app/\n"))
    with pytest.raises(TaskError, match="there is no such file"):
        task.settings(LOCAL)


def test_a_runs_copy_has_no_solution_and_is_named_by_its_content(tmp_path: Path) -> None:
    task = HarborTask(write_task(tmp_path / "sum"))
    name = ship_task(task, tmp_path / "tasks")
    assert name == ship_task(task, tmp_path / "tasks")
    copy = tmp_path / "tasks" / name
    assert sorted(path.name for path in copy.iterdir()) == [
        *("environment", "instruction.md", "task.toml", "tests")
    ]
    other = HarborTask(write_task(tmp_path / "other" / "sum", expected=43))
    assert ship_task(other, tmp_path / "tasks") != name


def test_trial_of_tasks_names_those_that_may_not_be_trained_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tasks"
    write_task(folder / "good")
    command = ["verify", "--source", f"harbor:{folder}", "--json"]
    assert main(command) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["task"], row["solution"], row["nothing"], row["problem"]) == ("good", 1, 0, "")
    write_task(folder / "wrong", solution="#!/bin/bash\necho 7 > answer.txt\n")
    write_task(folder / "untested", test="")
    write_task(folder / "easy", test="#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    assert main(command) == 1
    problems = {row["task"]: row["problem"] for row in json.loads(capsys.readouterr().out)}
    assert problems.keys() == {"good", "wrong", "untested", "easy"}
    assert problems["wrong"].startswith("its solution gets 0, expected 1: the answer is 7")
    assert "it has no tests/test.sh" in problems["untested"]
    assert problems["easy"] == "doing nothing gets 1, expected 0"
    assert main(["verify", "--source", f"harbor:{tmp_path / 'none'}"]) == 1
    assert "expected folders with task.toml each, found none" in capsys.readouterr().err


def test_an_image_is_built_of_the_dockerfile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip_without("podman")
    adding = "ENV NUMBERS=n.txt\nADD numbers.txt n.txt\nCOPY lib/ /app/\n"
    write_task(tmp_path / "built", dockerfile=f"FROM {IMAGE}\nWORKDIR /app\n{adding}")
    settings = json.dumps({"provider": "docker", "provider_settings": PODMAN})
    code = main(["verify", "--source", f"harbor:{tmp_path}", "--settings", settings, "--json"])
    (row,) = json.loads(capsys.readouterr().out)
    assert (code, row["solution"], row["nothing"], row["problem"]) == (0, 1, 0, "")


def test_folders_of_a_task_or_of_several_are_both_sources(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "a")
    assert task_folders(folder) == [folder] == task_folders(tmp_path)
    asyncio.run(judged(HarborTask(folder)))
