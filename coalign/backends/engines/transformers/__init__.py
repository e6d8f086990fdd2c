"""The engine on transformers' own cache, for every causal LM that transformers can load. Open engine.py first."""
