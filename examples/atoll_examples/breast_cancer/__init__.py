"""Tumours as measured in five hospitals."""
