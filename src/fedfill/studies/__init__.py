"""What is made of runs: one, a comparison, a paper's table, measures of synthetic images."""
