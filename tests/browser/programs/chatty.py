"""Waits for a file, then prints very much."""

import os
import sys
import time
from pathlib import Path

GO, LINES = Path(sys.argv[1]), int(sys.argv[2])
print("waiting", flush=True)
while not GO.exists():
    time.sleep(0.05)
rank = os.environ["RANK"]
for number in range(LINES):
    print(f"rank {rank} line {number} of a flood that nobody can read, with some words to make it long")
print(f"rank {rank} has printed all", flush=True)
time.sleep(120)
