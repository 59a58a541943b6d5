"""An OpenEnv environment on which the model repeats a sentence; the reward is how alike the two are, from 0 to 1."""

import random
from difflib import SequenceMatcher

from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

WORDS = ["Open", "Settings", "and", "then", "the", "camera", "app", "with", "one", "tap", "on", "this", "phone"]


class EchoAction(Action):
    message: str = Field(description="The sentence, repeated")


class EchoObservation(Observation):
    text: str = ""


class EchoEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.sentence = ""
        self.num_steps = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: object) -> EchoObservation:
        self.sentence, self.num_steps = " ".join(random.Random(seed).sample(WORDS, 4)), 0
        return EchoObservation(text=f"Repeat: {self.sentence}", done=False, reward=0.0)

    def step(self, action: EchoAction, timeout_s: float | None = None, **_: object) -> EchoObservation:
        self.num_steps += 1
        likeness = SequenceMatcher(None, self.sentence, action.message).ratio()
        return EchoObservation(text=f"{likeness:.0%} alike", done=True, reward=likeness)

    @property
    def state(self) -> State:
        return State(step_count=self.num_steps)


app = create_fastapi_app(EchoEnvironment, EchoAction, EchoObservation)
