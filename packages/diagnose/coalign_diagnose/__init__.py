"""Names the cause of a run that ended badly, from its logs. Needs no torch; open `verdict.py` first.

`rules.yaml` holds the causes and `rules.py` reads it. `logs.py` finds the lines, `tracebacks.py` the exceptions,
`findings.py` matches both with the rules, and `verdict.py` puts what was found in the order of cause and effect.
`collectives.py`, `hangs.py` and `stragglers.py` compare ranks. `report.py` writes the answer; `ending.py` is what a run
says of itself when it ends with an error. `doctor/` examines machines before a run, and `explain.py` tells what became
of its groups of samples: these two need Coalign.
"""
