"""Many sites in one process: engines, partitions, network and faults."""
