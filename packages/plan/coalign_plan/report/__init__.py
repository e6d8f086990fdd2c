"""`coalign plan`. Start with ``run_plan.py``, the order of things; ``page.py`` writes what is printed.

``probe.py`` measures this machine. ``step_trace.py`` draws a predicted step beside a measured one.
"""
