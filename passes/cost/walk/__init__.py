"""Model memory over a graph event by event, with Inductor's fusion."""
