"""Inside one site: the app protocol, the worker that trains it, and the process that the agent drives."""
