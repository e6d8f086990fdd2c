"""Live weight sync: after a training step the source's weights go to the models that compute with them.

Read first: sync.py, which picks a transport by where the ranks are. transport.py says what a transport is, and has
those within one process; the others are in shared_memory (CUDA IPC too), broadcast, and stored (object store, disk).
checksums and segment are what they are built from.
"""
