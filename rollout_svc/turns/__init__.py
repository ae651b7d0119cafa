"""What a turn is apart from the engine that samples it: ids, rendering, masks, seeds, parsing.

Nothing here imports torch, vLLM or transformers at module level; a tokenizer comes in from outside.
"""
