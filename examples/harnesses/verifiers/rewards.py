"""Rewards of our own beside those of a taskset, which names them in its configuration."""

import verifiers.v1 as vf


async def brevity(trace: vf.Trace) -> float:
    """From 1 for silence towards 0: ranks attempts at a game that the model does not win yet."""
    return 1 / (1 + sum(len(message.content or "") for message in trace.assistant_messages) / 100)
