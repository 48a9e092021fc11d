"""A schedule, a reducer and a strategy that Atoll finds by their entry points."""
