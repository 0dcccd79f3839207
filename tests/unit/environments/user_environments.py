"""Environments that go wrong in every way; replies say when."""

import os
import time
from pathlib import Path

from argusrl.environments.base import StepResult
from argusrl.types import Message


def message(text):
    return (Message(role="user", content=(text,)),)


class Scripted:
    """Does what the reply says; counts its turns, so that what it says depends on its history."""

    def __init__(self, salt=""):
        self.salt = salt
        self.turns = 0

    def reset(self, prompt, seed):
        self.turns = 0
        return message(f"seed {seed} prompt {prompt.id}")

    def step(self, reply):
        self.turns += 1
        if reply == "hang":
            while True:
                time.sleep(60)
        if reply == "exit":
            os._exit(9)
        if reply == "raise":
            raise ValueError("as told")
        if reply.startswith("raise once "):
            marker = Path(reply.removeprefix("raise once "))
            if not marker.exists():
                marker.touch()
                raise ValueError("only once")
        if reply == "nonsense":
            return "no StepResult"
        if reply == "nan":
            return StepResult(messages=message("?"), reward=float("nan"), terminated=False, truncated=False)
        if reply == "silent":
            return StepResult(messages=(), reward=0.0, terminated=False, truncated=False)
        if reply == "process":
            return StepResult(
                messages=message("here"), reward=0.0, terminated=False, truncated=False, info={"pid": os.getpid()}
            )
        done = reply == "done"
        return StepResult(
            messages=message(f"turn {self.turns}: {reply}"), reward=0.5, terminated=done, truncated=False, action=reply
        )

    def close(self):
        pass


class Forgetful(Scripted):
    """Shows something else each time it is made."""

    def reset(self, prompt, seed):
        return message(f"made at {time.time_ns()}")
