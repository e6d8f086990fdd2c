"""The vLLM engine. Open module.py first; the other files import vLLM, which may not be installed."""
