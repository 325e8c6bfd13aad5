"""What a terminal or a notebook shows: progress, tables, messages."""
