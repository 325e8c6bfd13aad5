"""What a run is on disk: its directory, who may write it, and what it was made from."""
