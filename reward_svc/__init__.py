"""Rewards: verifiers, their isolation, and the transforms that follow them."""
