"""What an answer is worth. It runs on reward workers and does not depend on policies or steps."""
