"""What we use of `transformers`, imported without what no language model needs.

Wherever they are installed, it also imports scikit-learn (for assisted generation) and SciPy (for
object detection). MLflow brings both, and they take longer than torch itself: every generator and
every trainer would pay for them at each start.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


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


with _hidden("sklearn", "scipy"):
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.utils import logging
    from transformers.utils.chat_template_utils import render_jinja_template

__all__ = [
    "AttentionInterface",
    "AutoConfig",
    "AutoModelForCausalLM",
    "render_jinja_template",
    "revert_weight_conversion",
    "without_progress_bars",
]


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
