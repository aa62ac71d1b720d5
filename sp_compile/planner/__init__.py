"""A training step planned before it runs, and what people look at: tables, JSON, a page, a picture, a command line."""
