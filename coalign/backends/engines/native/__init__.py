"""The native engine: continuous batching with transformers models in this process. Open engine.py first."""
