"""Headrace's light services: no module below imports torch, vLLM or transformers."""

import os

# gRPC core reads it when it is imported; its messages about connections that end are no news.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
