"""Conversion of model checkpoints between Hugging Face directories and Megatron's formats, tensor by tensor.

Both sides are boxes of Hugging Face tensors (coalign.weights.layouts.shards): a side lists what its files hold, and whatever is
written is planned from that. No megatron is imported here.
"""

from coalign.weights.convert.convert import ConversionReport, convert
from coalign.weights.convert.request import ConversionRequest

__all__ = ["ConversionReport", "ConversionRequest", "convert"]
