"""From a configuration to a run. Start with ``plan.py``: ``prepare(config)`` finds, checks and binds everything once.

``validate.py`` refuses settings that cannot work, ``devices.py`` finds the devices of models, ``check.py`` is `coalign
check`, ``data_load.py`` loads the data, and ``run.py`` trains. ``layout.py`` describes placements, ``template.py``
writes what `coalign init` prints.

For clusters that are not there: ``cluster_check.py`` places models on simulated nodes, ``memory_table.py`` shows what
devices hold, ``planned_run.py`` describes a run for coalign.planner, ``refusal.py`` says why a layout is refused.
"""
