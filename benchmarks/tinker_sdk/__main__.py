"""The Tinker SDK as a program that `tinker_service.py` starts in the SDK's own environment, and tells what to do.

    .venv-tinker/bin/python -m benchmarks.tinker_sdk URL KEY

Each line of its input is a command in JSON, each line of its output the answer: how long the SDK took, and what came.
"""

import json
import sys
import time
from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import tinker
from tinker import types

Chunks = Sequence[Sequence[int] | str]
"""Token ids, or a PNG as base64."""


def model_input(chunks: Chunks) -> types.ModelInput:
    """Text and images as the SDK takes them."""
    return types.ModelInput(
        chunks=[
            types.ImageChunk(data=b64decode(chunk), format="png")
            if isinstance(chunk, str)
            else types.EncodedTextChunk(tokens=list(chunk))
            for chunk in chunks
        ]
    )


def datum(chunks: Chunks, targets: Sequence[int], weights: Sequence[float]) -> types.Datum:
    """A sequence without its last token, which is only a target."""
    return types.Datum(
        model_input=model_input(chunks),
        loss_fn_inputs={
            "target_tokens": types.TensorData(data=list(targets), dtype="int64", shape=[len(targets)]),
            "weights": types.TensorData(data=list(weights), dtype="float32", shape=[len(weights)]),
        },
    )


def step(model: tinker.TrainingClient, command: dict[str, Any]) -> dict[str, Any]:
    """A pass and an optimizer step, sent at once."""
    data = [datum(*each) for each in command["data"]]
    began = time.perf_counter()
    trained = model.forward_backward(data, "cross_entropy")
    stepped = model.optim_step(types.AdamParams(learning_rate=command["learning_rate"]))
    loss = trained.result().metrics["loss:sum"]
    stepped.result()
    return {"seconds": time.perf_counter() - began, "loss": loss}


def sample(sampler: tinker.SamplingClient, command: dict[str, Any]) -> dict[str, Any]:
    """Samples of several prompts at a time."""
    prompts = [model_input(chunks) for chunks in command["prompts"]]
    params = types.SamplingParams(max_tokens=command["max_tokens"], seed=command["seed"], stop=[])
    began = time.perf_counter()
    futures = [sampler.sample(prompt, command["n"], params) for prompt in prompts]
    tokens = [len(sequence.tokens) for future in futures for sequence in future.result().sequences]
    return {"seconds": time.perf_counter() - began, "num_tokens": sum(tokens)}


def main() -> None:
    """Carry out commands until the input ends."""
    base_url, api_key = sys.argv[1:]
    service = tinker.ServiceClient(base_url=base_url, api_key=api_key)
    name = service.get_server_capabilities().supported_models[0].model_name
    assert name is not None, "a service names its models"
    model = service.create_lora_training_client(base_model=name, rank=8, seed=1)
    sampler = service.create_sampling_client(base_model=name)
    for line in sys.stdin:
        command = json.loads(line)
        answer = step(model, command) if "data" in command else sample(sampler, command)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
