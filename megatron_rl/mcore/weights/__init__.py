"""Loading, collecting and exporting weights, masters and adapters."""
