"""The base that all layers use: errors, ranks, registries, frames, progress."""
