"""The programs: they assemble the parts and talk to the user."""
