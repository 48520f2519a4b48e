"""Formats of inference engines: one file for each rank."""
