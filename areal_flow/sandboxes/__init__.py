"""Runs programs that a model wrote: hostile ones, never in a process that has a right answer."""
