"""New tokens for a tokenizer and its model: `coalign extend-vocab`. Open `extend.py` first.

`tokenizer.py` reads the tokens and adds them to the tokenizer (`merges.py`: as pieces), `extend.py` adds their rows.
"""

from coalign_megatron.vocab.extend import ExtensionReport, extend

__all__ = ["ExtensionReport", "extend"]
