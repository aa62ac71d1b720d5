"""Implement the ``sp::`` operators, which `import sp_compile` registers as ``torch.ops.sp``."""
