"""Servers over HTTP. Start with ``completion_server.py`` (`coalign serve`) or ``reward_server.py`` (`serve-reward`).

``completion_request.py`` reads requests of OpenAI's API, ``completion_answer.py`` writes answers. ``engine_loop.py``
computes the tokens: it steps an engine for all requests together; ``engine_process.py`` does so in other processes.
``listener.py`` has what both servers need: an address, a key, and limits.
"""
