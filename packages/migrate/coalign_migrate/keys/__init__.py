"""Keys of other frameworks and what they are called here: tables, read by `coalign import-config` and by errors.

Start with ``foreign_keys.py``. ``messages.py`` has what errors say. The tables are YAML: verl 0.7 and 0.9 have paths,
OpenRLHF 0.9 and 0.10 flags, TRL 1.16 arguments.
"""
