"""Numbers in, numbers out: how updates are encoded, summed, and turned into the next model. No network, no clock."""
