"""What we use of `transformers`, imported without packages that language models do not need.

`transformers` imports scikit-learn, SciPy and Accelerate where they are installed, which takes
longer than importing torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _hidden(*packages: str) -> Iterator[None]:
    """Make packages look as if they were not installed, unless they are imported already.

    If `transformers` was imported before, it has looked for them and must be able to import them.
    """
    is_imported = "transformers" in sys.modules
    hidden = [package for package in packages if package not in sys.modules and not is_imported]
    modules: dict[str, object] = sys.modules  # type: ignore[assignment]
    modules.update(dict.fromkeys(hidden))
    try:
        yield
    finally:
        for package in hidden:
            del modules[package]


with _hidden("sklearn", "scipy", "accelerate"):
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
def without_progress_bars() -> Iterator[None]:
    """Have `transformers` draw no progress bars: a worker shares the run's terminal."""
    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
