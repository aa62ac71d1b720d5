"""Access private parts of accelerate and transformers that the integrations require."""
