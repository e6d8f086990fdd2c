"""From a configuration to a run. Start with ``plan.py``: ``prepare(config)`` finds, checks and binds everything once.

``device_plan.py`` finds the devices of models, ``trace.py`` runs flows on stand-ins, ``check.py`` is `coalign check`,
``data_load.py`` loads the data, and ``run.py`` trains. ``layout.py`` describes placements. Settings that cannot work
are refused by the rooms that would do the work: ``prepare`` calls their ``check_…`` functions.
"""
