"""The loop of a run. Start with ``engine.py``: recipes subclass its ``Engine``.

- ``environment.py`` is the roll-out side: rounds of ``env_flow``, unfinished samples between them, and metrics of
  batches; ``filters.py`` and ``curriculum.py`` decide which groups are trained on.
- ``reward.py`` combines all rewards into ``self.reward``; ``reference.py`` finds reference log-probs without a second
  model; ``vocabulary.py`` compares tokenizers.
- ``hooks/`` is everything that watches the loop: evaluation, checkpoints, guards, records.
"""
