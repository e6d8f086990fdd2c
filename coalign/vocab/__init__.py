"""New tokens for a tokenizer and the model that uses it: `coalign extend-vocab`."""

from coalign.vocab.extend import Report, extend

__all__ = ["Report", "extend"]
