"""For authors of plugins: what a reducer must do whatever its formula, as a class of tests (`reducer_contract.py`).

Needs pytest, which Atoll itself does not install.
"""
