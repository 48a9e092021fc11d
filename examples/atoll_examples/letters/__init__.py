"""Characters of Python's standard library over three sites: adapters (LoRA) for a transformer that stays where it is."""
