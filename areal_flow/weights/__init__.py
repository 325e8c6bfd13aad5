"""How a policy's weights get from the trainer to the generators."""
