"""What a run does once a process, a node or its driver is lost; recovery.py says who answers which loss."""
