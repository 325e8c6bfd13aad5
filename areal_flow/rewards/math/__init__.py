"""Judges mathematical answers: as text, as exact numbers, by algebra in processes of its own."""
