"""sitsc.models: model presets and random checkpoints."""

if __name__ == "models":
    raise ImportError("import this package as sitsc.models, not as models")
