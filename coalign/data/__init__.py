"""From data files to batches: readers of files, encoders of rows, and a loader that draws the same batches every time.

Open `loader.py` first: it draws rows from sources and packs them. `batch.py` holds the packed columns that everything
else works on. `sources.py` reads files, `reader.py` and `messages.py` interpret a row, `kinds.py` turns it into token
sequences with a template of `templates.py`. `order.py` decides which row comes next, `cache.py` keeps tokens on disk.
Documents that were tokenised beforehand (`coalign indexed`) are read by coalign-megatron, whose format they have.
"""
