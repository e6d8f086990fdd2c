"""What computes with a model beside training: eval, generate, score, select, serve, chat, merge, and pipelines.

``generate.py``, ``score.py`` and ``select.py`` read rows and write JSON lines; ``resumable.py`` keeps what an
interrupted command has done. ``run_model.py`` finds the model of a run, ``judges.py`` scores by reward functions or a
reward model. ``pipeline.py`` runs stages in rounds. ``serving/`` answers HTTP, ``weights/`` merges and compares
weights. ``config/`` has the settings of them.
"""
