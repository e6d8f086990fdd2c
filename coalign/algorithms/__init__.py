"""The numerics of alignment training: pure functions of tensors that know nothing of models, clusters or files.

Start with ``advantages.py`` and ``losses/policy.py``. Losses are made of ``divergence.py`` (KL, importance weights) and
``segments.py`` (sums over sequences, aggregation); ``objective.py`` takes the mean of their values. ``logprobs.py``
computes log-probs from hidden states, ``comparisons.py`` makes pairs; the other files work on rewards.
"""
