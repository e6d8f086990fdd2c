"""The loop of a run. Start with ``engine.py``: recipes subclass its ``Engine``.

- ``environment.py`` is the rollout side: prompts go through ``env_flow``, and steps take complete groups;
  ``rollouts/`` has what it keeps them in.
- ``evaluator.py`` is the evaluation side; ``reference.py`` has references without a separate model.
- ``reward.py`` combines all rewards into ``self.reward``; ``vocabulary.py`` compares tokenizers.
- ``fleet.py`` changes numbers of processes; ``sampler_comparison.py`` compares users' generators with trainers.
- ``hooks/`` is everything that watches the loop: evaluation, checkpoints, guards, records.
"""
