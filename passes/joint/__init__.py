"""The passes over forward and backward in one graph, and what they need to know of its inputs and gradients."""
