"""Pure tensor functions: tensors and small dataclasses in, tensors out; no I/O, no services."""
