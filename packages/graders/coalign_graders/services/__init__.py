"""Rewards that ask others: services and language models over HTTP, judges, comparisons. They need Coalign.

``remote.py`` asks reward services, ``remote_judge.py`` language models; ``client.py`` sends. ``judge.py`` lets a model
of the run judge. ``questions.py`` has what judges are asked, ``groups.py`` compares the responses to a prompt.
"""
