"""Headrace's light services: no module below imports torch, vLLM or transformers."""
