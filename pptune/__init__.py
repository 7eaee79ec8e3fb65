"""Measure, predict, search and prove pipeline-parallel configurations."""

__version__ = "0.1.0"
