"""Models of transformers, trained and scored in plain torch. Start with ``fsdp.py``.

``fsdp.py`` has FSDPModule, and what it has in common with DeepSpeed's. ``heads.py`` computes log-probs, values or
scores. ``row_sharding.py`` cuts rows over ranks, ``parallel.py`` layers and experts. ``linear_layers.py`` recomputes,
compiles and rounds decoder layers, ``exact.py`` adds up gradients in an order of its own, and ``checks.py`` refuses
what a model cannot do.
"""
