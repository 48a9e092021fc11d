"""Fashion-mnist over ten sites."""
