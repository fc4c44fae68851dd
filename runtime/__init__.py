"""sitsc.runtime: the runtime: loads an artifact, compiles nothing, generates text."""

if __name__ == "runtime":
    raise ImportError("import this package as sitsc.runtime, not as runtime")
