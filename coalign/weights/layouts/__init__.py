"""How weights lie on the ranks of a parallel model: ``shards.py`` cuts, joins and plans boxes of full tensors."""
