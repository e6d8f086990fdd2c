"""Kernels for CPUs that torch has no fast ones for: attention of single tokens, the choice of tokens, log-probs.

Start with `operations.py`: what each kernel computes, and for which tensors there is one. `kernels.cpp` holds them;
`library.py` has the machine's C++ compiler compile that file once and loads the result. Without a compiler there are no
kernels, and callers compute with torch, which takes longer.
"""
