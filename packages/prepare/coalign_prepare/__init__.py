"""What prepares a run: a YAML to begin with, its schema, and a look at its data and rewards before anything loads.

``command.py`` has `init`, `recipes`, `schema` and `inspect-data`; ``run_template.py`` and ``yaml_writer.py`` write the
YAML, ``json_schema.py`` its schema. ``data_check.py`` reads the first rows for `coalign check` (with the tokenizer
of ``file_tokenizer.py``), ``reward_check.py`` calls the rewards on them, ``data_view.py`` shows rows. ``gguf.py``
reads models in the GGUF format.
"""
