"""What runs inside of the sandbox: scripts on the standard library alone, started as `python coalign/rewards/jail`."""
