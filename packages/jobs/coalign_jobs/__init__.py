"""A run as a job of a scheduler: rendered from its configuration, started, and followed; and sweeps of runs.

Start with ``job.py``: ``plan_job`` turns a configuration into a ``TrainingJob``. ``cluster_size.py`` finds nodes and
devices, ``shipment.py`` has the code that travels, ``environment.py`` the variables. ``ray.py``, ``kuberay.py``,
``slurm.py``, ``skypilot.py`` and ``torchrun.py`` each render and start one target; ``ray_script.py`` and
``yaml_text.py`` are what several of them write. ``sweep/`` runs a configuration with other settings, trial by trial.
"""
