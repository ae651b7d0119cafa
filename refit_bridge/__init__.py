"""The refit bridge: who has which weight version, and how it gets there.

Invariants
- Only ``sender`` and ``receiver`` import torch; the service itself does not.
- A version is committed on an engine only after every tensor of the plan arrived with its checksum, answers
  inside the engine as its source does, and the engine's log-probabilities agree with the trainer's.
"""
