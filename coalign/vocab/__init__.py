"""New tokens for a tokenizer and its model: `coalign extend-vocab`. Open `extend.py` first.

`sources.py` reads the tokens, `tokenizer.py` and `merges.py` add them to the tokenizer, `model.py` adds their rows."""

from coalign.vocab.extend import ExtensionReport, extend

__all__ = ["ExtensionReport", "extend"]
