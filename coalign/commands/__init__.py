"""Commands beside training, one module each: generate, score, select, serve, chat, evaluate, explain, check_sync,
pipeline.

Open generate.py first. judges.py scores responses, resumable.py keeps finished work across a kill, run_history.py
reads journals. plan/ predicts and searches.
"""
