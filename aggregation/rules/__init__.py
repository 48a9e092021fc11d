"""The rules of local training, and what a site keeps for itself. `rule.py` says what a rule is."""
