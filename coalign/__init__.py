"""Coalign: alignment training of language models, several models in one run, from a laptop to a Ray cluster."""

import os

__version__ = "0.1.0"

# Bars and load reports of libraries would tear Coalign's own display, in this process and in every worker.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
