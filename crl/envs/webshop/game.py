"""Game of WebShop: a visit to the shop that ends with a purchase."""

from __future__ import annotations

from crl.envs.actions import parse_call
from crl.envs.base import Rendering
from crl.envs.webshop.goals import Goal
from crl.envs.webshop.reward import get_reward
from crl.envs.webshop.session import Session
from crl.envs.webshop.shop import Shop, open_shop
from crl.envs.webshop.text import RENDERERS
from crl.types import StepResult, Task


class WebShopGame:
    """`Game` of WebShop. A purchase ends it.

    The score of the purchase is WebShop's reward. A score of 1 gives reward 1 and success. Any
    other score gives reward 0. `moves` is the number of actions that the game has accepted.
    """

    def __init__(self, rendering: Rendering, shop: Shop | None = None) -> None:
        """Create a game in `shop`. None: the shop that all games of the process share."""
        self.moves = 0
        self._shop = shop or open_shop()
        self._renderer = RENDERERS[rendering]
        self._session: Session | None = None
        self._goal: Goal | None = None

    def reset(self, task: Task) -> str:
        """Start the visit of the task's `lgen` and `core`.

        Raise `KeyError` if the task's params lack one of them.
        """
        self._goal = self._shop.goal(int(task.params["lgen"]), int(task.params["core"]))
        self._session = Session(
            self._shop.engine, self._renderer.name_links, self._renderer.per_page
        )
        self.moves = 0
        return self._renderer.page(self._session, self._goal)

    def step(self, action: str) -> StepResult:
        """Search or click. Raise `RuntimeError` outside an episode."""
        session, goal = self._session, self._goal
        if session is None or goal is None or session.bought:
            raise RuntimeError("the episode is over: call reset first")
        call = parse_call(action, {"search": None, "click": session.clickable})
        if call is None:
            return StepResult(
                f"{self._renderer.invalid(session)}\n{self._renderer.page(session, goal)}",
                valid=False,
                score=0.0,
            )
        self.moves += 1
        name, argument = call
        if name == "search":
            session.search(argument.lower())
        else:
            session.click(argument)
        if session.bought is None:
            return StepResult(self._renderer.page(session, goal), score=0.0)
        score, _ = get_reward(session.bought, goal, session.bought["price"], session.chosen)
        success = score == 1.0
        return StepResult(
            self._renderer.bought(score),
            reward=float(success),
            done=True,
            success=success,
            score=score,
        )

    def close(self) -> None:
        """Do nothing. The shop belongs to the process."""
