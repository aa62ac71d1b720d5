"""How the ``sp::`` operators run. `import sp_compile` registers them as ``torch.ops.sp``."""
