"""How Megatron cuts weights: a rank's boxes of Hugging Face tensors (``megatron.py``), from its configuration,
parameters and their names (``megatron_model.py``). The boxes are those of coalign.weights.layouts.shards."""
