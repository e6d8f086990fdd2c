"""Images of rows: files by content, their positions in a text, and pixels as a model's processor makes them.

Open `image_files.py` first (ImageFile, ImageFiles): everything else holds references to files, never pixels. A run of
text loads `placeholders.py` alone.
"""
