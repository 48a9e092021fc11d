"""Boosted trees over hospitals: a model that is no tensors."""
