"""Media that carry a policy's weights from the trainer to the generators."""
