"""Sums in the fixed order of the contract's tree."""
