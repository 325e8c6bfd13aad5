"""The default job's own parts: its sums, its policy, and the answers that it imitates first."""
