"""DeepSpeed's ZeRO as a backend of Coalign: module.py, the only file that imports deepspeed."""
