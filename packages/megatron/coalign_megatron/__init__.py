"""Megatron beside Coalign: the backend, conversion of checkpoints, indexed datasets, and vocabularies that grow.

``backend/`` trains with megatron-core. ``convert/`` turns Hugging Face directories into Megatron's formats and back, by
the tables of ``families/`` and the boxes of ``layouts/``; it needs no megatron-core. ``indexed_build.py`` makes indexed
datasets, ``vocab/`` adds tokens to a tokenizer and its model.
"""
