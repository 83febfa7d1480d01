"""Moving tokens to their experts and back, and the grouped products of all experts of a rank."""
