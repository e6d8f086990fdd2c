"""What people see of a run: the terminal (display.py, to open first), its step lines, plots, trackers.

watch.py is the screen of `coalign watch`, and run_view.py what is on it.
"""
