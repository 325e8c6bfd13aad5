"""What a run would need, computed before anything is started."""
