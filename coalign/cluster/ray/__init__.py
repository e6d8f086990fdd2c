"""Models on a Ray cluster, and what else asks Ray for something. Start with ``ray_cluster.py``: RayCluster.

- ``actor.py`` is a model's process and the handle to it, ``store.py`` keeps payloads in Ray's object store.
- ``connection.py`` joins a Ray cluster and leaves it; ``space.py`` has what can be said of Ray without importing it.
- ``placements.py`` places processes, also when nodes are lost; ``ray_devices.py`` reserves their devices.
"""
