"""The run folder for other processes, which read it while a run trains, or send requests to the run.

Nothing here imports torch, or anything else that is slow. records.py, to open first, follows the files that grow.
lock.py says whether a run is going, and whose it is. control.py asks a run to save, to stop, or to change its
processes. rollouts.py reads and writes the tokens of the samples that are logged.
"""
