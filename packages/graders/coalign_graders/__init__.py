"""Graders: functions from a response and its row to a number, measured against right and wrong answers.

``answers.py`` compares text, ``math_answer.py`` mathematics, ``choice.py`` multiple choice; ``code.py`` runs programs
in ``sandbox/``. They need neither torch nor Coalign. ``checker.py`` makes checks in processes that can be killed;
``equality.py``, ``notation.py``, ``quantity.py``, ``region.py`` and ``layout.py`` decide whether two answers are equal.
``boxes.py`` opens boxes, in which commands of any sort run. ``services/`` asks others, and needs Coalign.
"""
