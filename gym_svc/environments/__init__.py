"""Environments: what an agent acts in. See :mod:`gym_svc.environments.base` for the protocol."""
