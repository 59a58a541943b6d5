"""The trainer processes of one machine: `python -m cua_rl.training.launch_ranks SIZE SOCKET`.

Starts one worker per rank of this node and ends with the first that fails; the process guard then ends the others. On a
single machine they meet in the folder of SOCKET, which other users cannot enter, where torchrun would listen on all
addresses and unpickle what comes. NODE_RANK and NUM_NODES say which of several nodes this is, MODEL_VARIABLE its
folder of the model, MEETING_VARIABLE and MEETING_TOKEN_VARIABLE where the ranks meet and how they know each other.
"""

import os
import subprocess
import sys

MODEL_VARIABLE = "CUA_RL_MODEL"
MEETING_VARIABLE = "CUA_RL_MEETING"
MEETING_TOKEN_VARIABLE = "CUA_RL_MEETING_TOKEN"


def main(arguments: list[str]) -> int:
    """Run the ranks; the exit status is that of the first that fails."""
    size, node = int(arguments[0]), int(os.environ.get("NODE_RANK", "0"))
    num_ranks = size * int(os.environ.get("NUM_NODES", "1"))
    ranks: dict[int, int] = {}
    for local_rank in range(size):
        rank = node * size + local_rank
        place = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": size}
        process = subprocess.Popen(
            [sys.executable, "-m", "cua_rl.training.worker", *arguments[1:]],
            env=os.environ | {name: str(value) for name, value in place.items()},
        )
        ranks[process.pid] = rank
    while ranks:
        pid, status = os.wait()
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            sys.stderr.write(f"rank {rank} ended with status {code}, so all trainer processes end\n")
            return code if code > 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
