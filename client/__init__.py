"""What speaks for a site (the agent) and for a person (the researcher). Loads no torch."""
