"""Reads shell scripts as a shell would, and starts nothing: `ShellScript` has the commands with their words expanded.

Start with ``script.py``. ``lexer.py`` cuts a text into tokens, ``parser.py`` makes statements of them, ``expansion.py``
has variables, arrays and quotes, ``arithmetic.py`` numbers. What only a machine could say (`$(date)`, variables that
nobody sets) stays in the words, between marks (``marks.py``).
"""
