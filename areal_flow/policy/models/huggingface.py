"""What we use of `transformers`, imported without what no language model needs.

It would also import scikit-learn, SciPy and Accelerate where they are installed, torch's compiler
and its sharded tensors, and SymPy with both. Together they take longer than torch itself, at each
start of every generator and every trainer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import distributed

COMPILER = "torch._dynamo"


@contextmanager
def _hidden(*packages: str) -> Iterator[None]:
    """Have packages look as if they were not installed, unless they are imported already.

    Where `transformers` was imported before, it has looked for them already and must find them.
    """
    found_out = "transformers" in sys.modules
    hidden = [package for package in packages if package not in sys.modules and not found_out]
    modules: dict[str, object] = sys.modules  # type: ignore[assignment]
    modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for package in hidden:
            del modules[package]


class _AbsentCompiler(ModuleType):
    """Has decorators that leave every function as it is, and the modules of the real one."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.__path__ = [str(Path(torch.__file__).with_name("_dynamo"))]

    @staticmethod
    def disable(function: Any = None, *_: object, **__: object) -> Any:
        return function or (lambda decorated: decorated)

    assume_constant_result = allow_in_graph = disable


@contextmanager
def without_compiler() -> Iterator[None]:
    """Have torch's compiler stand aside, unless it is imported already; later it can be."""
    if COMPILER in sys.modules:
        yield
        return
    sys.modules[COMPILER] = torch._dynamo = _AbsentCompiler()
    try:
        yield
    finally:
        del sys.modules[COMPILER], torch._dynamo


@contextmanager
def _replaced(module: ModuleType, name: str, answer: object) -> Iterator[None]:
    """Have a function of a module give this answer: `transformers` asks once."""
    function = getattr(module, name)
    setattr(module, name, lambda: answer)
    try:
        yield
    finally:
        setattr(module, name, function)


with (
    _hidden("sklearn", "scipy", "accelerate"),
    without_compiler(),
    _replaced(distributed, "is_available", False),  # built for one process
    # Read of every installed package; without it a package is looked up by its own name.
    _replaced(metadata, "packages_distributions", {}),
):
    from transformers import (
        AttentionInterface,
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TokenizersBackend,
        conversion_mapping,
        core_model_loading,
    )
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.modeling_outputs import BaseModelOutputWithPast
    from transformers.utils import logging
    from transformers.utils.chat_template_utils import render_jinja_template


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Have modules made without storage; torch would import its compiler to draw their weights."""
    with torch.device("meta"), without_compiler():
        yield


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Have `transformers` draw no bars while this is entered: a worker's terminal is the run's."""
    drawn = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if drawn:
            logging.enable_progress_bar()
