"""Verifiers: what judges a finished sample. See :mod:`reward_svc.verifiers.base`."""
