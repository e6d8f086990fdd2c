"""`coalign import-config`: a run's YAML from the configuration of verl, OpenRLHF or TRL.

Start with ``import_config.py``. ``source.py`` reads files and command lines, ``translation.py`` keeps what became of
each key, and ``verl.py``, ``openrlhf.py`` and ``trl.py`` have what several keys decide together. The table of keys is
`coalign/config/foreign_keys.py`.
"""
