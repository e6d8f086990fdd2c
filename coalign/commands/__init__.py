"""Commands beside training, one module each: evaluate, merge, check_sync, ask_run (save, stop, scale).

``run_model.py`` finds a run's model, its chat template, and the dtype to compute in.
"""
