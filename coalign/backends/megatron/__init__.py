"""Models of megatron-core (the only files that import it), built from coalign.weights.families, for packed rows."""

import warnings

# What is not installed is said once, by Coalign, where it matters.
warnings.filterwarnings("ignore", module=r"megatron\.")
warnings.filterwarnings("ignore", message=r"`torch.distributed.\w+` is deprecated")
