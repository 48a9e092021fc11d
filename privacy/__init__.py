"""What an update may reveal: secure aggregation. Its pure parts are here, and no run uses them yet."""
