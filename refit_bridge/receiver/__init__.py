"""The engine's side: runs inside vLLM's worker. Nothing here is imported by the bridge's service."""
