"""Pages and tables for people: the run's report, comparisons, and evaluations."""
