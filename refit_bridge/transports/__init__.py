"""How weights travel from the trainer to an engine. Today: files of shared memory on one host."""
