"""`coalign plan`. Start with ``run_plan.py``, the order of things; ``page.py`` writes what is printed.

``trace.py`` draws a predicted step beside a measured one. The physics is in coalign/planner/.
"""
