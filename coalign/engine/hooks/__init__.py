"""The hooks of the training loop, one concern a module; evaluation.py shows how small a hook is.

Hooks: evaluation, guards, recorder, journal, provenance, goodput, timeline (and profiler), run_control (and signals);
coalign.checkpoint.schedule has those that save. run_folder.py owns the files of a run, rollout_files.py those with the
tokens of samples. watchdog.py is a thread that reports a stalled run. coalign.launch.run puts them together.
"""
