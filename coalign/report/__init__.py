"""What people see of a run: the terminal (display.py, to open first), its step lines, plots, and trackers."""
