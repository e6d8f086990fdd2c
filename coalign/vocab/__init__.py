"""New tokens for a tokenizer and the model that uses it: `coalign extend-vocab`."""

from coalign.vocab.extend import ExtensionReport, extend

__all__ = ["ExtensionReport", "extend"]
