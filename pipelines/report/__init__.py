"""A run on one page of HTML that loads nothing: what it did, how fast, and what went wrong."""
