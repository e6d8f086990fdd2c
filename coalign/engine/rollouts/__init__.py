"""Groups of samples on their way to a step. Start with ``bundle.py``: groups that go through `env_flow` together.

- ``selection.py`` decides which prompts are drawn and which groups are trained on; ``pool.py`` holds those that wait.
- ``unfinished.py`` keeps the groups that the next rollout continues.
- ``events.py`` tells a listener what happens to groups; ``journal.py`` writes it down.
- ``finished_rollouts.py`` keeps finished rollouts for a resumed run.
"""
