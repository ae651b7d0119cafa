"""The trainer room: policy, optimizer, losses and checkpoints behind the `Trainer` service."""
