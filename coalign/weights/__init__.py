"""Weights between models and files: live sync, shards of tensors, and readers of model files.

Read first: sync/sync.py. layouts/shards.py cuts and joins tensors of parallel models, compare.py finds what differs
between two sets of weights, model_files.py and metadata.py read files that are not trusted.
"""
