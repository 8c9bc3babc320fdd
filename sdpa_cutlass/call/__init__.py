"""From arguments to a launch: checks, operands, results, plans that are kept, and launches."""
