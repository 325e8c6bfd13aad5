"""Reads configurations of TRL, verl and AReaL, and writes them as recipes."""
