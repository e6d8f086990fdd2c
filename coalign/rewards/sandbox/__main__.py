"""Run as a script (`python coalign/rewards/sandbox`), with the standard library alone: see supervisor.py."""

from supervisor import main

main()
