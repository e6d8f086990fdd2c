"""What a run keeps, and how it begins again.

schedule.py, to open first, has the hooks that save, and says what a checkpoint holds. resume.py chooses the checkpoint
from which a run goes on, and loads it. folder.py completes checkpoints on the disk and in memory, remote.py copies them
elsewhere, and manifest.py proves that one is intact.
"""
