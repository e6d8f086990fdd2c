"""Coalign: alignment training of language models, several models in one run, from a laptop to a Ray cluster."""

__version__ = "0.1.0"
