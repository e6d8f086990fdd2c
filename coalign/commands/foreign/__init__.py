"""`coalign import-config`: a run's YAML from the configuration of verl, OpenRLHF, ChatLearn or TRL.

Start with ``import_config.py``. ``source.py`` reads files and command lines, ``translation.py`` keeps what became of
each key, and ``verl.py``, ``openrlhf.py``, ``chatlearn.py`` and ``trl.py`` have what several keys decide together. The
tables of keys are `coalign/config/foreign_keys.py`, which error messages read, too, and ``chatlearn_keys.py``.
"""
