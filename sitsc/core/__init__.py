"""sitsc.core: what every part shares: plan, ops, verifier, artifact, hardware, options, errors."""
