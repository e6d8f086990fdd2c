"""The loop of a run. Start with ``engine.py``: recipes subclass its ``Engine``.

- ``environment.py`` is the roll-out side: bundles of prompts go through ``env_flow``, and steps take complete groups;
  ``filters.py`` decides which prompts are drawn and which groups are trained on.
- ``reward.py`` combines all rewards into ``self.reward``; ``vocabulary.py`` compares tokenizers.
- ``journal.py`` writes what became of groups.
- ``hooks/`` is everything that watches the loop: evaluation, checkpoints, guards, records.
"""
