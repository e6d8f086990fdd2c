"""Writes tasks for sorter.py to a file: words to sort, and the same in order."""

import json
import random
import sys
from pathlib import Path

FRUIT = ["apple", "cherry", "date", "fig", "grape", "kiwi", "lemon", "mango", "olive", "peach", "pear", "plum"]

draw = random.Random(0)
tasks = [draw.sample(FRUIT, 3) for _ in range(64)]
lines = [json.dumps({"prompt": " ".join(words), "answer": " ".join(sorted(words))}) + "\n" for words in tasks]
Path(sys.argv[1]).write_text("".join(lines))
