"""What an answer is worth. Runs on reward workers; knows nothing of policies or steps."""
