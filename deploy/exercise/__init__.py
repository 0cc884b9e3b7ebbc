"""What a deployment does, done on this machine without containers: see `python -m deploy.exercise --help`."""
