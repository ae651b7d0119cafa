"""Parts of :mod:`benchmarks.rollout`: the model, Headrace's processes, the baselines."""
