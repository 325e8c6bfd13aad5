"""From a prompt to a trajectory: prompts, workflows, tools and engines."""
