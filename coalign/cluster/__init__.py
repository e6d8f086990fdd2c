"""Models in processes. Start with ``cluster.py``: what every cluster does. ``dist.py``: a model as the driver sees it.

- ``local.py`` runs models in this process, ``ray/`` on a Ray cluster, ``torchrun.py`` in the processes that torchrun
  started; ``dry.py`` records a flow on batches of zeros.
- ``batch_shards.py`` splits batches over workers, also into micro-batches that do not depend on how many there are.
- ``worker.py`` runs a module in its process; ``memory_report.py`` says what is in a memory that was too small.
- ``slices.py`` keeps the replicas of a policy generating while its trainer trains, and replaces lost ones.
- ``future.py`` has calls, futures and answers, ``batch_ref.py`` references to batches.
- ``choice.py`` chooses the cluster that a configuration asks for.
- ``placement/`` decides which process gets which devices, ``residency.py`` which models are on the devices now.
- ``survivors/`` is what outlives a driver that is killed, so that the run goes on with it.
- ``stacks.py`` reads the Python stacks of processes that hang.
"""
