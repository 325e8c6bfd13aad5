"""`auto` in a recipe becomes a value: what each machine and each cluster gives."""

from __future__ import annotations

import re
import subprocess
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from areal_flow.cluster import placement
from areal_flow.config import Recipe, build_recipe, dump_recipe, load_recipe
from areal_flow.config.devices import TINY_MODELS
from areal_flow.core import machine
from areal_flow.core.errors import ConfigError
from areal_flow.core.machine import Gpu, Gpus, installed_gpus, why_torch_has_no_cuda
from areal_flow.core.settings import merge
from areal_flow.rollout.engines import registry
from areal_flow.rollout.engines.protocol import GenerationSettings
from areal_flow.rollout.engines.vllm import support
from areal_flow.training.settings import TrainerSettings
from pipelines.cli import plan
from pipelines.cli.main import main
from pipelines.jobs import preflight
from pipelines.jobs.built_in import MODELS

L4, T4 = Gpu("NVIDIA L4", 22 << 30, (8, 9)), Gpu("Tesla T4", 15 << 30, (7, 5))
P100 = Gpu("Tesla P100", 16 << 30, (6, 0))
NONE, ONE, TWO = Gpus(), Gpus((L4,)), Gpus((L4, L4))
CPU_TORCH = Gpus((L4,), "torch 2.13.0+cpu is a build for CPUs: install one for CUDA")
MODEL: dict[str, Any] = {"model": "./mine"}
ON_CPU, ON_GPU = ("cpu", "float32") * 2, ("cuda", "bfloat16") * 2


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that has this process see some GPUs, and vLLM or not."""

    def be(gpus: Gpus, *, vllm: bool = True) -> None:
        monkeypatch.setattr(machine, "gpus_here", lambda: gpus)
        monkeypatch.setattr(preflight, "gpus_here", lambda: gpus)
        monkeypatch.setattr(placement, "installed_gpus", lambda: gpus.visible)
        for module in (support, registry):
            monkeypatch.setattr(module, "installed_vllm", lambda _: "0.32.0" if vllm else None)

    return be


def recipe(**table: Any) -> Recipe:
    return build_recipe(merge(MODEL, table), source="test")


def chosen(recipe: Recipe) -> tuple[str, ...]:
    trainer, generation = recipe.trainer, recipe.generation
    return trainer.device, trainer.dtype, generation.device, generation.dtype


@pytest.mark.parametrize(
    ("gpus", "table", "expected"),
    [
        (NONE, {}, ON_CPU),
        (ONE, {}, ON_GPU),
        (TWO, {}, ON_GPU),
        (CPU_TORCH, {}, ON_CPU),
        (Gpus((T4,)), {}, ("cuda", "float32") * 2),
        (Gpus((L4, T4)), {}, ("cuda", "float32") * 2),
        (Gpus((P100,)), {}, ON_CPU),
        (Gpus((Gpu("NVIDIA GPU"),)), {}, ON_GPU),
        (ONE, {"model": "tiny"}, ON_CPU),
        (ONE, {"trainer": {"device": "cpu"}}, ("cpu", "float32", "cuda", "bfloat16")),
        (ONE, {"trainer": {"dtype": "tf32"}}, ("cuda", "tf32", "cuda", "bfloat16")),
        (ONE, {"generation": {"device": "auto", "dtype": "auto"}}, ON_GPU),
        (NONE, {"generation": {"device": "auto", "dtype": "auto"}}, ON_CPU),
        (NONE, {"generation": {"dtype": "bfloat16"}}, ("cpu", "float32", "cpu", "bfloat16")),
        (ONE, {"cluster": {"num_gpus": 0}}, ON_CPU),
        (NONE, {"cluster": {"num_gpus": 2}}, ON_GPU),
        (ONE, {"cluster": {"launcher": "slurm"}}, ON_CPU),
        (NONE, {"cluster": {"launcher": "slurm", "num_gpus": 8}}, ON_GPU),
        (NONE, {"cluster": {"launcher": "slurm", "slurm": {"all": ["--gres=gpu:1"]}}}, ON_GPU),
        (NONE, {"cluster": {"launcher": "slurm", "slurm": {"trainer": ["--gpus=2"]}}}, ON_GPU),
        (NONE, {"cluster": {"launcher": "slurm", "slurm": {"all": ["--partition=gpu"]}}}, ON_CPU),
        (NONE, {"cluster": {"launcher": "kubernetes", "num_gpus": 8}}, ON_GPU),
        (ONE, {"cluster": {"launcher": "kubernetes"}}, ON_CPU),
    ],
)
def test_auto_is_what_the_machine_or_the_cluster_has(
    on: Any, gpus: Gpus, table: dict[str, Any], expected: tuple[str, ...]
) -> None:
    on(gpus)
    assert chosen(recipe(**table)) == expected


def test_one_gpu_is_shared_with_room_for_both(on: Any) -> None:
    on(ONE)
    shared = recipe()
    assert shared.shares_gpu
    assert shared.generation.vllm.gpu_memory_utilization == 0.4
    in_turns = recipe(schedule="sync").generation.vllm
    assert (in_turns.gpu_memory_utilization, in_turns.enable_sleep_mode) == (0.6, True)
    given = recipe(generation={"vllm": {"gpu_memory_utilization": 0.2}})
    assert given.generation.vllm.gpu_memory_utilization == 0.2
    on(TWO)
    assert recipe().cluster.num_gpus is None
    assert recipe().generation.vllm.gpu_memory_utilization == 0.9
    on(ONE)
    assert not recipe(cluster={"num_generators": 2}).shares_gpu
    assert not recipe(trainer={"device": "cpu"}).shares_gpu


def test_settings_of_vllm_are_left_alone_where_it_is_not_installed(on: Any) -> None:
    on(ONE, vllm=False)
    shared = recipe(schedule="sync")
    assert shared.takes_turns
    assert shared.generation.vllm == GenerationSettings().vllm


def test_sections_given_as_objects_follow_the_machine_too(on: Any) -> None:
    on(ONE)
    of_objects = Recipe(model="./mine", trainer=TrainerSettings(learning_rate=1e-6))
    assert chosen(of_objects) == ON_GPU
    assert of_objects.trainer.learning_rate == 1e-6
    assert of_objects.generation.vllm.gpu_memory_utilization == 0.4
    on_cpu = Recipe(model="./mine", trainer=TrainerSettings(device="cpu"))
    assert chosen(on_cpu)[:2] == ("cpu", "float32")


@pytest.mark.parametrize("before", [NONE, ONE, TWO], ids=["CPU", "one GPU", "two GPUs"])
def test_recorded_recipe_has_the_same_digest_on_every_machine(
    on: Any, tmp_path: Path, before: Gpus
) -> None:
    on(before)
    recorded, file = recipe(), tmp_path / "config.toml"
    file.write_text(dump_recipe(recorded))
    assert not re.search('(device|dtype) = "auto"', file.read_text())
    for after in (NONE, ONE, TWO, CPU_TORCH):
        on(after)
        assert load_recipe(file).digest() == recorded.digest()


def test_default_recipe_is_the_same_with_and_without_gpus(on: Any) -> None:
    on(NONE)
    digest = Recipe().digest()
    on(TWO)
    assert Recipe().digest() == digest
    assert set(TINY_MODELS) == set(MODELS)


def test_wrong_settings_are_named_as_ever(on: Any) -> None:
    on(ONE)
    for table, message in [
        ({"cluster": {"num_gpus": -1}}, "cluster.num_gpus = -1: Input should be greater"),
        ({"trainer": 3}, "trainer = 3: Input should be"),
        ({"generation": {"vllm": 3}}, "generation.vllm = 3: Input should be"),
    ]:
        with pytest.raises(ConfigError) as raised:
            recipe(**table)
        assert message in str(raised.value)


@pytest.mark.parametrize(
    ("gpus", "table", "expected"),
    [
        (NONE, {}, "Devices: trainer cpu float32, generation cpu float32; no GPU here"),
        (ONE, {}, "cuda bfloat16; 1 of the GPUs here (1 x NVIDIA L4), which trainer and generator"),
        (Gpus((L4,) * 8), {}, "; 2 of the GPUs here (8 x NVIDIA L4): cluster.num_generators and"),
        (Gpus((T4,)), {}, "generation cuda float32; 1 of the GPUs here (1 x Tesla T4), which"),
        (Gpus((T4,)), {}, "share; it has no bfloat16"),
        (CPU_TORCH, {}, "idle (1 x NVIDIA L4): torch 2.13.0+cpu is a build for CPUs: install one"),
        (Gpus((P100,)), {}, "stay idle (1 x Tesla P100): torch no longer supports them"),
        (ONE, {"model": "tiny"}, "stay idle (1 x NVIDIA L4): a tiny model is as fast on a CPU"),
        (ONE, {"cluster": {"num_gpus": 0}}, "idle (1 x NVIDIA L4): settings say so"),
        (ONE, {"cluster": {"launcher": "slurm"}}, "no GPU is requested: set cluster.num_gpus for"),
        (NONE, {"cluster": {"launcher": "slurm", "num_gpus": 8}}, "workers are on other machines"),
        (
            NONE,
            {
                "trainer": {"device": "cpu"},
                "generation": {"device": "cpu"},
                "cluster": {"launcher": "srun", "num_gpus": 8},
            },
            "GPUs stay idle: trainer.device and generation.device say so, workers are on other",
        ),
    ],
)
def test_one_line_says_what_computes_and_what_stays_idle(
    on: Any, gpus: Gpus, table: dict[str, Any], expected: str
) -> None:
    on(gpus)
    line = preflight.describe_devices(recipe(**table))
    assert expected in line
    assert "\n" not in line


LISTED = "GPU-a1, NVIDIA GB10, [N/A], 12.1\nGPU-b2, Tesla T4, 15360, 7.5\n"


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    def answer(listed: str | None) -> tuple[Gpu, ...]:
        def run(*_: Any, **__: Any) -> Any:
            if listed is None:
                raise FileNotFoundError("nvidia-smi")
            return subprocess.CompletedProcess([], 0, listed, "")

        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(machine, "NVIDIA_DEVICES", tmp_path)
        monkeypatch.setattr(machine, "installed_gpus", installed_gpus.__wrapped__)
        return installed_gpus.__wrapped__()

    return answer


def test_driver_lists_its_gpus(driver: Any) -> None:
    gb10, t4 = driver(LISTED)
    assert gb10 == Gpu("NVIDIA GB10", 0, (12, 1), "GPU-a1")
    assert t4 == Gpu("Tesla T4", 15360 << 20, (7, 5), "GPU-b2")
    assert driver("Failed to initialize NVML: Driver/library version mismatch") == ()


def test_gpus_of_a_container_without_the_driver_s_program_are_counted(
    driver: Any, tmp_path: Path
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-caps"):
        (tmp_path / name).touch()
    assert len(driver(None)) == 2


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["NVIDIA GB10", "Tesla T4"]),
        ("1", ["Tesla T4"]),
        ("GPU-b2", ["Tesla T4"]),
        ("", []),
        ("-1", []),
        ("1,-1,0", ["Tesla T4"]),
    ],
)
def test_hidden_gpus_do_not_count(
    driver: Any, monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]
) -> None:
    driver(LISTED)
    monkeypatch.delenv(machine.VISIBLE_GPUS, raising=False)
    if visible is not None:
        monkeypatch.setenv(machine.VISIBLE_GPUS, visible)
    gpus = machine.gpus_here.__wrapped__()
    assert [gpu.name for gpu in gpus.visible] == names


def test_build_of_torch_is_read_without_loading_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')\n")
    monkeypatch.setattr(
        machine, "find_spec", lambda name: spec_from_file_location(name, package / "__init__.py")
    )
    version, cuda = "__version__ = '2.13.0'\n", "cuda: Optional[str] = "
    (package / "version.py").write_text(f"{version}{cuda}None\nhip: Optional[str] = None\n")
    assert why_torch_has_no_cuda() == "torch 2.13.0 is a build for CPUs: install one for CUDA"
    (package / "version.py").write_text(f"{version}{cuda}'13.0'\nhip: Optional[str] = None\n")
    assert why_torch_has_no_cuda() == ""
    (package / "version.py").write_text(f"{version}{cuda}None\nhip: Optional[str] = '7.1'\n")
    assert why_torch_has_no_cuda() == ""


@pytest.mark.parametrize(
    ("gpus", "vllm", "expected", "works"),
    [
        (NONE, "", "- gpu none models are trained on the CPU", True),
        (NONE, "", "- vllm missing for GPUs, version 0.32.0; on a CPU the torch engine", True),
        (ONE, "", "ok gpu 1 x NVIDIA L4 what device = 'auto' uses, in bfloat16", True),
        (ONE, "", "generation is slow without it; 0.32.0 fits: pip install '.[vllm]'", True),
        (ONE, "0.32.0", "- vllm vllm 0.32.0 installed", True),
        (ONE, "0.31.0", "expected 0.32.0, the only version that is tested: pip install", True),
        (Gpus((T4,)), "", "1 x Tesla T4 what device = 'auto' uses, in float32, for lack of", True),
        (Gpus((P100,)), "", "- gpu 1 x Tesla P100 idle: torch no longer supports them", True),
        (CPU_TORCH, "", "FAIL gpu 1 x NVIDIA L4 idle: torch 2.13.0+cpu is a build for CPUs", False),
    ],
)
def test_doctor_says_which_gpu_is_used_and_what_is_missing(
    on: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpus: Gpus,
    vllm: str,
    expected: str,
    works: bool,
) -> None:
    def installed(device: str) -> str | None:
        return vllm if vllm and device == "cuda" else None

    on(gpus, vllm=bool(vllm))
    monkeypatch.setattr(plan, "gpus_here", lambda: gpus)
    monkeypatch.setattr(plan, "installed_vllm", installed)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["doctor"]) == (0 if works else 1)
    assert expected in " ".join(capsys.readouterr().out.split())


def test_plan_puts_on_gpus_what_a_recipe_leaves_open(on: Any, tmp_path: Path) -> None:
    on(NONE)
    file = tmp_path / "r.toml"
    file.write_text('model = "mine"\n[trainer]\ndevice = "cpu"\n')
    over = plan._on_gpus(file, {"num_steps": 3}, num_gpus=1)
    generation = {"device": "cuda", "engine": "vllm"}
    assert over == {"num_steps": 3, "generation": generation, "cluster": {"num_gpus": 1}}
    assert plan._on_gpus(file, {"model": "tiny"}, num_gpus=4) == {"model": "tiny"}
    over = plan._on_gpus(None, {"model": "mine"}, num_gpus=None)
    recipe = build_recipe(over, source="test")
    assert chosen(recipe) == ON_GPU
    planned = plan._with_plain_defaults(
        recipe.model_copy(update={"model": "Qwen2.5-0.5B"}), over, gpu_bytes=22 << 30
    )
    assert planned.trainer.learning_rate == 1e-6
    assert planned.generation.max_new_tokens == 1024
