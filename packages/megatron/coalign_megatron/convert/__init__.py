"""Conversion of checkpoints between Hugging Face directories and Megatron's formats. Open `convert.py` first.

Source and output are boxes of Hugging Face tensors (coalign_megatron.layouts.shards): `sources.py` lists what the files
of the source hold, and `plan.py` plans the output from that. `huggingface.py`, `torch_dist.py` and `legacy.py` know the
formats. megatron-core is not needed.
"""

from coalign_megatron.convert.convert import ConversionReport, convert
from coalign_megatron.convert.sources import ConversionRequest

__all__ = ["ConversionReport", "ConversionRequest", "convert"]
