"""The native engine: continuous batching with transformers models in this process. Open native_engine.py first."""
