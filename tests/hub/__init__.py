"""Tests of models by the names that the Hugging Face hub gives them, against a server of the hub's endpoints."""
