"""Who starts the processes of a site's world: one module for each, over one `WorldSpec`."""
