"""`coalign import-config`: a run's YAML from the configuration of another framework.

Start with ``import_config.py``. ``source.py`` reads files and command lines, with ``shell/`` and ``python_source.py``,
which start nothing. ``translation.py`` keeps what became of each key, and a file for each framework has what several
keys decide together. ``keys/`` has tables of keys; Coalign's error messages read them, too.
"""
