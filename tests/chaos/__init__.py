"""Runs that lose processes: killed, stopped, slowed. `make test-chaos`."""
