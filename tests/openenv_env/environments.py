"""Two environments of the package `openenv-core`, served at a port: `environments.py NAME PORT`."""

from __future__ import annotations

import random
import sys
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

HIGHEST = 100


class Guess(Action):
    """A number."""

    number: int


class Hint(Observation):
    """Where the secret number is."""

    text: str


class GuessingGame(Environment):
    """A number from 1 to 100 is to be guessed; each wrong guess costs 0.1."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        """Choose the number."""
        self._secret = random.Random(seed).randint(1, HIGHEST)
        self._state = State(episode_id=episode_id)
        return Hint(text=f"from 1 to {HIGHEST}")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        """Compare a guess."""
        self._state.step_count += 1
        if action.number == self._secret:
            return Hint(text="right", reward=1.0, done=True)
        return Hint(text="higher" if action.number < self._secret else "lower", reward=-0.1)

    @property
    def state(self) -> State:
        """Return the number of guesses."""
        return self._state


class Till(MCPEnvironment):
    """Prices are to be added; the episode ends with the right total."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        mcp = FastMCP("till")

        @mcp.tool()
        def add(price: int) -> str:
            """Add a price."""
            self._total += price
            return f"total {self._total}"

        super().__init__(mcp)
        self._total, self._expected, self._state = 0, 0, State()

    def reset(self, seed: int | None = None, **_: Any) -> Observation:
        """Choose the total."""
        self._total, self._expected, self._state = 0, 2 + (seed or 0) % 5, State()
        return Observation()

    async def step_async(self, action: Action, **options: Any) -> Observation:
        """Call a tool; the reward is 1 for the right total."""
        observation = await super().step_async(action, **options)
        if isinstance(action, CallToolAction) and isinstance(observation, CallToolObservation):
            self._state.step_count += 1
            observation.done = self._total == self._expected
            observation.reward = float(observation.done)
        return observation

    def _step_impl(self, action: Action, **_: Any) -> Observation:
        raise NotImplementedError

    @property
    def state(self) -> State:
        """Return the number of calls."""
        return self._state


SERVED = {
    "guess": (GuessingGame, Guess, Hint),
    "till": (Till, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    app = create_app(*SERVED[sys.argv[1]], max_concurrent_envs=5)
    uvicorn.run(
        app, port=int(sys.argv[2]), log_level="warning", ws_ping_interval=0.5, ws_ping_timeout=0.5
    )
