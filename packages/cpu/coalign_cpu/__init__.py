"""Kernels for CPUs that torch has no fast ones for.

They compute attention of single tokens, the choice of tokens, log-probs, RMSNorm, gates of MLPs, copies with checksums.

Start with `operations.py`: what each kernel computes, and for which tensors there is one. `kernels.cpp` holds them;
`library.py` has the machine's C++ compiler compile that file once and loads the result. `layers.py` gives layers of a
model their kernels. Without a compiler there are no kernels, and callers compute with torch, which takes longer.
"""
