"""Models of megatron-core over packed rows: the only package that imports it. Open module.py first.

module.py: the backend. partition.py: which rank has what of the weights; no megatron-core is imported here. build.py,
model.py, attention.py: the model. lora.py: adapters in its layers. training.py: pipeline, optimizer and checkpoints.
verify.py: compares a converted model with transformers'. cpu.py: runs megatron-core without a GPU.
"""

import warnings

# Coalign itself reports packages that are missing, where they are needed.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", message=r"`torch.distributed.\w+` is deprecated")
