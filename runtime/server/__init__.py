"""sitsc.runtime.server: HTTP for an engine, in two processes (docs/serve.md).

One owns the engine and does nothing else; the other speaks HTTP, applies chat templates and turns
text to ids, so that many connections never delay a step.
"""
