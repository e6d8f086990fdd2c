"""Modules that only score. Start with ``reward_functions.py``, which calls reward functions.

``retokenize.py`` runs a reward model or a teacher with its own tokenizer. ``cached.py`` keeps a frozen model's
log-probs on disk.
"""
