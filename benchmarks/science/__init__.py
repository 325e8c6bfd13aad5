"""Small experiments, each a page of the documentation: seeds, intervals, a table and a plot."""
