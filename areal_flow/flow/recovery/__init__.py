"""Who may write a run, which checkpoints it keeps, and how it goes on after a crash."""
