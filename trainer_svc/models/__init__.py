"""The policy network: loading, log-probabilities, micro-batches, Hugging Face directories."""
