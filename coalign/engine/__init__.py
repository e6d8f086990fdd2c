"""The loop of a run. Start with ``engine.py``: recipes subclass its ``Engine``.

- ``environment.py`` is the rollout side: bundles of prompts (``rollout.py``) go through ``env_flow``, complete groups
  wait in a pool (``pool.py``), and steps take them; ``selection.py`` decides which prompts are drawn and which groups
  are trained on; ``unfinished.py`` keeps the groups that the next rollout continues.
- ``evaluator.py`` is the evaluation side; ``reference.py`` has references without a separate model.
- ``reward.py`` combines all rewards into ``self.reward``; ``vocabulary.py`` compares tokenizers.
- ``events.py`` tells listeners what happens to groups, ``journal.py`` writes it; ``finished_rollouts.py`` keeps finished rollouts for a resumed run.
- ``fleet.py`` changes numbers of processes; ``sampler_comparison.py`` compares users' generators with trainers.
- ``hooks/`` is everything that watches the loop: evaluation, checkpoints, guards, records.
"""
