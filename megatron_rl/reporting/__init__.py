"""What a person reads: the report page, plots and the tables of an evaluation."""
