"""Ways to split attention over ranks, and the choice among them."""
