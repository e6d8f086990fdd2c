"""What `coalign check` asks: memory of every model and device, and placement on a cluster that need not be there.

Start with ``fit.py``. ``memory_table.py`` says what models and devices hold, ``cluster_check.py`` places models,
``planned_run.py`` describes a run for the search of layouts, ``refusal.py`` says why a layout is refused.
"""
