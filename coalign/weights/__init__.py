"""Weights between models and files: live sync, and readers of model files.

Read first: sync/sync.py. model_files.py and metadata.py read files that are not trusted.
"""
