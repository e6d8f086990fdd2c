"""Models on processes. Start with ``base.py``: what every cluster does; ``dist.py`` is a model as the driver sees it.

- ``local.py`` is this process, ``ray.py`` a Ray cluster, ``dry.py`` stand-ins that record a flow.
- ``worker.py`` runs a module in its process; ``future.py`` has calls, futures and references to batches; ``answers.py``
  waits for workers; ``balance.py`` splits batches over them; ``functions.py`` applies functions to columns.
- ``placement/`` decides which process gets which devices, ``residency.py`` which model is on them now.
"""
