"""Device memory that models keep between calls, and its copies on the host. Open `arena.py` first."""
