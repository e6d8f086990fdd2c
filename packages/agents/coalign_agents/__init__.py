"""Agents as environments: any program that asks a model, with the policy behind the interface that it knows.

``agent.py`` plays functions of a person. ``tools.py`` answers the policy's calls by Python functions, ``games.py`` has
rules of games.
"""
