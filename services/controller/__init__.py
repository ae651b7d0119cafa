"""The controller: runs, the fenced step loop, validation, recovery and the summary that people read."""
