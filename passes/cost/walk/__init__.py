"""Model the memory of a graph kernel by kernel, with Inductor's fusion."""
