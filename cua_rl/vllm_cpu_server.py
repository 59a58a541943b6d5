"""vLLM's API server on a CPU, with a forked engine: `python -m cua_rl.vllm_cpu_server` and the server's own options.

vLLM spawns its engine on CPUs, which imports torch and vLLM a second time: nearly half of a start's processor time.
Forking is safe here: the API server computes nothing before it starts the engine, so OpenMP has no threads yet that
would be missing in the child.
"""

import multiprocessing
from importlib import import_module

from vllm.entrypoints.launchers.api_server.entry import main
from vllm.v1.engine import utils

if __name__ == "__main__":
    for module in ("vllm.v1.engine.core", "cua_rl.vllm_cpu_worker"):
        import_module(module)  # what the engine needs, before the fork
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")  # pyright: ignore[reportPrivateImportUsage]
    main()
