"""sitsc.core.diff: what two plans do differently, in words and figures; plain Python, no torch."""
