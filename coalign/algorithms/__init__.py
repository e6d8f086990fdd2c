"""The numerics of alignment training: pure functions of tensors that know nothing of models, clusters or files.

Start with ``advantages.py`` and ``losses/policy.py``. ``kl.py``, ``importance.py`` and ``aggregate.py`` are what losses
are made of; ``logprobs.py`` computes log-probs from hidden states, ``comparisons.py`` makes pairs; the other files
work on rewards.
"""
