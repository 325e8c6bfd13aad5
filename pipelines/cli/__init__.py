"""The command line: arguments and what a terminal shows."""
