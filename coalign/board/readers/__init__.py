"""Readers of run folders: each is a function ``(folder, params)`` that returns a value for JSON, and loads no torch.

They raise ValueError or FileNotFoundError with one sentence. Open ``samples.py`` first.

- ``samples.py`` lists samples.jsonl by step, group and sample; ``rollouts.py`` reads the tokens of one sample;
  ``images.py`` finds the images that a sample lists.
- ``timeline.py`` reads traces of steps and faults; ``placement.py`` where processes are and their memory;
  ``checkpoints.py`` what can be resumed; ``goodput.py`` where the time went; ``flow.py`` the recipe's flow.
- ``records.py`` reads JSON lines and parameters.
"""
