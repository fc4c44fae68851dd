"""sitsc.frontend: checkpoints of every format, and tracing them to an FX graph without weights."""
