"""Decides which process of a model gets which devices. Start with ``slots.py``: which models share devices.

``nodes.py`` assigns slots to the nodes of a cluster, and knows types of devices and which are close.
"""
