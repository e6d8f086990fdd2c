"""Megatron's indexed datasets: ``tokens.py`` reads and writes them, ``indexed_build.py`` makes them of documents."""
