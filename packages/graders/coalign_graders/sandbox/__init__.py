"""Runs untrusted Python code. Start with ``sandbox.py``, the caller's side.

The other files run as a script (`python …/sandbox`), with the standard library alone: ``supervisor.py`` starts each job
in a fresh process, ``job.py`` is that process, and ``rights.py``, ``landlock.py`` and ``seccomp.py`` take away its
rights.
"""
