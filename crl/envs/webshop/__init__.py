"""`webshop`: buy the product of an instruction in a shop of 1,000 products.

Sources: WebShop (Yao et al. 2022), CRL C.1. This module declares the environment and loads no
products. The shop loads them when the first task is drawn.

The paper draws a goal for every group by weight. A stream with no permanent places and one visit
per place does the same. With more visits, a need (a wanted product) persists while the wanted
options vary. It is then worth learning how to recognise the product.
"""

from __future__ import annotations

from crl.envs.base import ActionSpace, EnvSpec, Game, Rendering
from crl.envs.curriculum import Curriculum
from crl.envs.webshop.lessons import WebShopAdvisor, digest
from crl.envs.webshop.player import WebShopPlayer
from crl.envs.webshop.tasks import NAME, TASKS, probe_tasks


def make_game(rendering: Rendering) -> Game:
    from crl.envs.webshop.game import WebShopGame

    return WebShopGame(rendering)


SPEC = EnvSpec(
    name=NAME,
    make_game=make_game,
    tasks=TASKS,
    actions=ActionSpace(
        description="search[keywords], and click[what can be clicked on the page: "
        "a button, a product's code, the value of an option]",
        example="search[blue cotton shirt]",
    ),
    turns=30,
    curriculum=Curriculum(WebShopPlayer, digest, WebShopAdvisor(), probe_tasks),
)
