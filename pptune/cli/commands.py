"""Importing this module registers every command."""

from pptune.cli import predict, profile, search, show, tune, validate

__all__ = ["predict", "profile", "search", "show", "tune", "validate"]
