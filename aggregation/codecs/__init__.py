"""How an update travels: dtypes as they are, narrower ones, and blocks of scaled integers."""
