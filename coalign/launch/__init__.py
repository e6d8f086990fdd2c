"""From a configuration to a run. Start with ``plan.py``: ``prepare(config)`` finds, checks and binds everything once.

``validate.py`` has the refusals, ``check.py`` is `coalign check`, ``build.py`` adds data and a cluster, ``run.py`` trains.
``layout.py`` says where models live, ``memory_estimate.py`` how much memory they take.
"""
