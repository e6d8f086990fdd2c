"""How weights lie on the ranks of a parallel model.

Read first: shards.py (boxes of full tensors; cut, join, plan, reshard). megatron.py makes a Megatron rank's boxes from
its configuration, parameters and their names (megatron_model).
"""
