"""Use the backend in training libraries: DistributedDataParallel, accelerate and transformers.

Each module imports its library; this one imports none.
"""
