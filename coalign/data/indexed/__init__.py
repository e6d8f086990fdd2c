"""Documents as token ids on disk, in Megatron's format: written once, mapped by every run."""

from coalign.data.indexed.documents import IndexedDocuments, prefix_of
from coalign.data.indexed.format import Indexed, Writer, dtype_for

__all__ = ["Indexed", "IndexedDocuments", "Writer", "dtype_for", "prefix_of"]
