"""What reads and writes a model's weights beside training: `merge`, `check-sync`, and a comparison of two sets.

Start with ``compare.py``; ``merge.py`` and ``check_sync.py`` are the commands.
"""
