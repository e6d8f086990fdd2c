"""Commands beside training, one module each: generate, score, select, serve, chat, evaluate, check_sync, pipeline.

Open generate.py first. judges.py scores responses, resumable.py keeps finished work across a kill.
"""
