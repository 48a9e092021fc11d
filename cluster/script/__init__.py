"""A training script with a loop of its own as the worker of a run: what runs in it, and what passes on between it and the agent."""
