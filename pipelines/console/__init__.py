"""Output on a terminal or in a notebook: progress, tables, messages, summaries."""
