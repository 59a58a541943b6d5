"""Several trainer processes on one machine: `python -m cua_rl.training.launch_ranks SIZE SOCKET`.

Starts one worker per rank and ends with the first that ends; the process guard then ends the others. They meet in the
folder of SOCKET, which other users cannot enter, where torchrun would listen on all addresses and unpickle what comes.
"""

import os
import subprocess
import sys


def main(arguments: list[str]) -> int:
    """Run the ranks; the exit status is that of the first that fails."""
    size, socket_path = int(arguments[0]), arguments[1]
    worker = [sys.executable, "-m", "cua_rl.training.worker", socket_path]
    ranks = {
        process.pid: rank for rank in range(size) for process in [subprocess.Popen([*worker, str(rank), str(size)])]
    }
    while ranks:
        pid, status = os.wait()
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code:
            sys.stderr.write(f"rank {rank} ended with status {code}, so all trainer processes end\n")
            return code if code > 0 else 128 - code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
