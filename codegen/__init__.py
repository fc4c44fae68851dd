"""sitsc.codegen: code generation: kernels and packages from a plan."""

if __name__ == "codegen":
    raise ImportError("import this package as sitsc.codegen, not as codegen")
