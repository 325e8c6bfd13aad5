"""What a run directory holds in, findings out: the rules of the log. No I/O, no Lance."""
