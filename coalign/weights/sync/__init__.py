"""Live weight sync: after a training step the source's weights go to the models that compute with them.

Read first: sync.py, which picks a transport by where the ranks are. transport.py says what a transport is; each one
has a file of its own (in_process, shared_memory, cuda_ipc, broadcast, object_store, disk). checksums, buckets and
segment are what they are built from.
"""
