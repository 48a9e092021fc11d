"""How the updates of a round combine. `reduction.py` says what a reducer is; `spooled.py` carries those that need all."""
