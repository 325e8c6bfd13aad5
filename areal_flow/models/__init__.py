"""Policies and how they attend. Shared by the torch engine and the trainer; knows neither."""
