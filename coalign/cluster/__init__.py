"""Models in processes. Start with ``base.py``, what every cluster does; ``dist.py`` is a model as the driver sees it.

- ``base.py`` also runs models in this process, ``ray.py`` on a Ray cluster, ``torchrun.py`` in the processes that
  torchrun started; ``dry.py`` records a flow on batches of zeros. ``dist.py`` also splits batches over workers, and
  ``worker.py`` runs a module in its process. ``ray_jobs.py`` submits whole runs to a Ray cluster.
- ``slices.py`` keeps the replicas of a policy generating while its trainer trains, and replaces lost ones.
- ``future.py`` has calls, futures, answers and references to batches.
- ``placement/`` decides which process gets which devices, ``residency.py`` which models are on the devices now.
- ``survivors/`` is what outlives a driver that is killed or a node that is lost, so that the run goes on with it.
- ``stacks.py`` reads the Python stacks of processes that hang.
"""
