"""Salus: many deep-learning jobs share one GPU."""

__version__ = "0.1.0.dev0"
