"""The aggregation server: membership, runs, the path of an update, the store, the services."""
