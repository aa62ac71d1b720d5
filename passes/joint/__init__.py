"""Run passes over joint graphs, and map facts about inputs and gradients to them."""
