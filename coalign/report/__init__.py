"""Output for people: the terminal (display.py, to open first), step lines, plots, trackers."""
