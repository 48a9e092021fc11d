"""What agent and worker say to each other over a unix socket inside one site. JSON, one message a line; no tensors.

Tensors pass through files that both map: the base model (read only) and the update (written by the worker).
Loads no torch: the agent imports this.
"""
