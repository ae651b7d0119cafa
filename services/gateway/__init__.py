"""The REST face of a stack: runs, trajectories, engines, the buffer, health; see docs/api.md."""
