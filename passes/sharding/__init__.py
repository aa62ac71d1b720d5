"""How values lie on ranks: placements, the rules of operators, and the dims that are the sequence."""
