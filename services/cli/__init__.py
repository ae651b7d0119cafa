"""The command line. ``main`` is quick to import: commands import what they need when they run."""
