"""Runs code that nobody has read. Start with ``sandbox.py``, the side of the caller.

The other files run beneath it, as the script `python coalign/rewards/sandbox`, on the standard library alone:
``supervisor.py`` starts each job in a fresh process, ``job.py`` is that process, and ``rights.py``, ``landlock.py`` and
``seccomp.py`` take away what code under test must not do.
"""
