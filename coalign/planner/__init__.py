"""Predicts the time, memory traffic and idleness of a step of training before anybody pays for it."""
