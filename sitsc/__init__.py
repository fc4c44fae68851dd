"""sitsc: an ahead-of-time compiler and runtime for large language models."""

import os

__version__ = "0.1.0"

# The OpenMP runtime reads this once, when torch loads it, so it must be set before. By default a
# thread that waits spins for milliseconds; where another process holds a core, each of the 150
# parallel regions of a token then waits that long (measured: 1.8 s a token instead of 24 ms).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
