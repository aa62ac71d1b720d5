"""One FX pass a file. Each runs by hand on a graph, as `examples/` shows; `sp_compile.pipeline` runs them in order."""
