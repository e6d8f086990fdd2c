"""Documents as token ids on disk, in Megatron's format: written once, mapped by every run."""

from coalign.data.indexed.documents import IndexedDocuments, find_prefix
from coalign.data.indexed.format import IndexedTokens, IndexedWriter, choose_dtype

__all__ = ["IndexedDocuments", "IndexedTokens", "IndexedWriter", "choose_dtype", "find_prefix"]
