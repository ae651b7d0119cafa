"""One engine: a light host process and the worker process that it keeps alive.

Nothing in the host imports torch, vLLM or transformers; :mod:`rollout_svc.engine.worker` does.
"""
