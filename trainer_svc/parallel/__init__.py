"""Which rank this process is."""
