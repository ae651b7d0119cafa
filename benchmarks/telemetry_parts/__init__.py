"""Parts of the benchmark ``telemetry``: the collectors, and the runs that report to them."""
