"""Models of transformers, trained and scored in plain torch. Start with ``fsdp.py``.

- ``module.py`` is what FSDP and DeepSpeed have in common; ``heads.py`` computes log-probs, values or scores.
- ``ranks.py`` makes the device meshes; ``rows.py`` cuts rows, ``tensor_parallel.py`` layers.
- ``expert_parallel.py`` distributes experts; ``collectives.py`` has differentiable collectives.
- ``layers.py`` recomputes and compiles decoder layers; ``float8.py`` has them multiply in 8 bits.
"""
