"""Layouts: how the models of a run lie on devices, and which layout is best. Open ``partition.py`` first.

- ``partition.py`` says how a backend divides one model; ``devices.py`` what each device of a placement then holds.
- ``adapter.py`` turns a configuration with its layout into the job that coalign_plan.prediction predicts.
- ``candidates.py`` lists the layouts of one model, ``search.py`` those of a whole run.
"""
