"""Example apps for Atoll. Each folder has an app, a job, and a `prepare` that writes every site's data file."""
