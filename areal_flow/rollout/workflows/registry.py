"""Workflows by name. A new one is a file, a name here, and tests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from areal_flow.core.errors import ConfigError
from areal_flow.core.settings import Settings, import_function, unnamed_is
from areal_flow.rewards.shipping import load_function, located
from areal_flow.rollout.workflows.agent import Agent
from areal_flow.rollout.workflows.episode import Workflow
from areal_flow.rollout.workflows.openenv import OpenEnv
from areal_flow.rollout.workflows.sandbox_task import TASKS, SandboxTask
from areal_flow.rollout.workflows.tool_use import ToolUse, WithTools
from areal_flow.rollout.workflows.turns import MultiTurn, SingleTurn


class ImportedWorkflow(Settings):
    """A workflow of one's own, beside the package."""

    name: Literal["imported"] = "imported"
    """What an episode is: a workflow that is found by its import path."""
    path: str
    """`package.module:Class`, or a function that returns a `Workflow`."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments."""


AnyWorkflow = SingleTurn | MultiTurn | ToolUse | SandboxTask | Agent | OpenEnv | ImportedWorkflow

WorkflowSettings = Annotated[AnyWorkflow, Field(discriminator="name"), unnamed_is("single_turn")]
"""What a recipe's `[workflow]` accepts: a shipped workflow is its own settings."""


def load_workflow(settings: WorkflowSettings, functions: Path) -> Workflow:
    """Return a workflow that can load its functions; `functions` is the folder of shipped ones."""
    if isinstance(settings, Agent):
        settings = settings.model_copy(update={"path": located(settings.path, functions)})
        load_function(settings.path, setting="workflow.path", error=ConfigError)
    if isinstance(settings, WithTools):
        tools = tuple(located(tool, functions) for tool in settings.tools)
        settings = settings.model_copy(update={"tools": tools})
    if isinstance(settings, SandboxTask) and not settings.tasks:
        settings = settings.model_copy(update={"tasks": str(functions / TASKS)})
    if not isinstance(settings, ImportedWorkflow):
        return settings
    make = import_function(settings.path, setting="workflow.path", error=ConfigError)
    try:
        workflow: Workflow = make(**settings.settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"workflow.settings = {settings.settings}: {error}") from error
    if not callable(getattr(workflow, "run", None)):
        raise ConfigError(f"workflow.path = {settings.path!r} makes no workflow: it has no `run`")
    return workflow
