"""How Megatron cuts weights: a rank's boxes of Hugging Face tensors (``megatron.py``), from its configuration,
parameters and their names (``megatron_model.py``). ``shards.py`` cuts, joins and plans boxes of full tensors."""
