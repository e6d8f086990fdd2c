"""The home of what judges ask (`models.judge.judge: {fn: pairwise}`): companions bring the classes.

A class of your own is named by its dotted path (``my.pkg:Class``), and its keyword-only arguments are configuration.
"""

__all__: list[str] = []
