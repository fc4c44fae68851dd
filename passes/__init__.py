"""sitsc.passes: passes over the FX graph: canonicalise, match, fuse, schedule, memory."""

if __name__ == "passes":
    raise ImportError("import this package as sitsc.passes, not as passes")
