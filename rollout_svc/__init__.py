"""The rollout room: a light router in front of vLLM engine processes."""
