"""Ends with exit code 0 if answer.txt has the words of the command line in this order."""

import re
import sys
from pathlib import Path

words = re.findall(r"[a-z]+", Path("answer.txt").read_text().lower())
positions = [words.index(word) if word in words else -1 for word in sys.argv[1].split()]
sys.exit(positions != sorted(positions) or -1 in positions)
