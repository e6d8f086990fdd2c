"""The vLLM engine. Open vllm_module.py first; the other files import vLLM, which may not be installed."""
