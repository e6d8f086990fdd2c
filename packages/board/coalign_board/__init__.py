"""`coalign board`: a local page over run folders, live while runs train, and after.

Open `server.py` first: it has the table of what the page can ask for. `access.py` decides who may ask. `catalog.py`
finds run folders, and `status.py` says how a run is doing. `readers/` turn a run folder into JSON, one file a page.
`static/` is the page itself: ES modules without a build. The process imports no torch.
"""
