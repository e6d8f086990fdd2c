"""`coalign doctor`: checks every node of a cluster before a run. Start with ``doctor.py``.

``node_facts.py`` measures one node, on that node; ``device_facts.py`` its devices. ``network.py`` sends bytes between
two nodes. ``preflight.py`` judges what was measured: pure functions, which tests call with facts that they make up.
"""
