"""`coalign sweep`: trials of a run with other settings. Start with ``sweep.py``, which starts them and hears of them.

``space.py`` lists the settings of trials, ``state.py`` keeps what became of them, ``trial.py`` is the process of one,
and ``results.py`` makes the table and the pictures at the end.
"""
