"""sitsc: an ahead-of-time compiler and runtime for large language models."""

__version__ = "0.1.0"
