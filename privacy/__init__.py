"""What an update may reveal: clipping and fixed point, secure aggregation, differential privacy. Empty for now."""
