"""These tests need vLLM: they run in `nox -s tests_vllm`."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["test_*.py"]
