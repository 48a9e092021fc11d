"""Handwritten digits over three sites."""
