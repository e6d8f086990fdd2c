"""What computes with a model beside training: generate, score, select, serve, chat, and pipelines of them.

``generate.py``, ``score.py`` and ``select.py`` read rows and write JSON lines; ``resumable.py`` keeps what an
interrupted command has done. ``judges.py`` scores by reward functions or a reward model. ``pipeline.py`` runs stages in
rounds. ``serving/`` answers HTTP. ``config/`` has the settings of them all.
"""
