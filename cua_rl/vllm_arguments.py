"""Checks options for vLLM's server with the installed vLLM's own parser: `python -m cua_rl.vllm_arguments OPTION ...`.

A process of its own, because importing vLLM takes seconds and gigabytes. The last line on stderr says what is wrong.
"""

import sys
from argparse import Namespace
from pathlib import Path

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

from cua_rl.sampling.config import ServerConfig
from cua_rl.sampling.vllm_command import vllm_options

_RESERVED = {
    **dict.fromkeys(("model", "model_tag"), "model_name"),
    **dict.fromkeys(("tensor_parallel_size", "data_parallel_size"), "server.gpus and server.tensor_parallel"),
    **dict.fromkeys(("host", "port", "uds", "ssl_keyfile", "ssl_certfile"), "server.port"),
    "api_key": "VLLM_API_KEY",
    "hf_token": "HF_TOKEN",
    "config": "its options",
}
"""What a run sets in another way, and what its user sets."""


def main(arguments: list[str]) -> int:
    """0: vLLM takes these options beside a run's own; 2: it does not, or the run sets one of them itself."""
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    defaults = vars(parser.parse_args([]))

    def changed(options: list[str]) -> set[str]:
        return {name for name, value in vars(parser.parse_args(options)).items() if value != defaults[name]}

    config = ServerConfig(model_path=Path("model"), max_lora_rank=8, dtype="bfloat16")
    own = changed(vllm_options(config, "unix:/vllm.sock", "cpu")) | changed(
        vllm_options(config, "unix:/vllm.sock", "cuda")
    )
    for name in sorted(changed(arguments) & (own | _RESERVED.keys())):
        option = f"--{name.replace('_', '-')}"
        instead = _RESERVED.get(name, "a setting of the group server, if there is one")
        sys.stderr.write(f"{option} is set by the run; leave it out, and use {instead}\n")
        return 2
    validate_parsed_serve_args(Namespace(**vars(parser.parse_args(arguments))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
