"""Rewards of services over HTTP: `remote.py` asks reward services, `judge.py` language models; `client.py` sends."""
