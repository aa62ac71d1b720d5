"""Plan a training step before it runs, and render reports as tables, JSON and a page."""
