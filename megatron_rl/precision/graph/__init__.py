"""The precision of every tensor as a graph of operators, for trainer and engine."""
