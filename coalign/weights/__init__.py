"""Weights on the move: live sync between models, conversion of checkpoints, and the formats and layouts of both.

Read first: sync/sync.py (live sync), convert/convert.py (conversion). families says how Hugging Face tensors map to
Megatron's, layouts how tensors lie on ranks; compare.py finds what differs between two sets of weights.
"""
