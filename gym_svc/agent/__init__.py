"""Agents: what drives a sample through its turns. See :mod:`gym_svc.agent.base`."""
