"""Tokenised documents on disk in Megatron's format: written once, mapped by every run.

`format.py` reads and writes the files, `build.py` makes them from text, `documents.py` is their source for training.
"""

from coalign.data.indexed.format import IndexedDocuments, IndexedTokens, IndexedWriter, choose_dtype, find_prefix

__all__ = ["IndexedDocuments", "IndexedTokens", "IndexedWriter", "choose_dtype", "find_prefix"]
