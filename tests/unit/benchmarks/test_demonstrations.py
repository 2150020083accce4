"""Demonstrations in the full rendering: a run can use every reply."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from crl.config import RunConfig, load
from crl.manager.distillation.ops import parse_merge, parse_ops, parse_refine
from crl.rollout.critic import parse_critique
from support.paths import benchmark

demonstrations = benchmark("demonstrations")


def config_of(models: dict[str, Path], folder: Path) -> RunConfig:
    """Return a config of the room in the full rendering."""
    sets = ["ask.enabled=true", "run.steps=1", "rollout.groups=2", "rollout.group_size=4"]
    for role, source in models.items():
        model = Path(shutil.copytree(source, folder / role))
        (model / "crl.json").unlink()  # the profile is then full
        sets.append(f"{role}.model={model}")
    return load(["room"], sets=[*sets, "embedder.model=hash"])


def written(role: str, config: RunConfig, folder: Path) -> list[list[dict[str, Any]]]:
    path = folder / f"{role}.jsonl"
    demonstrations.write(path, role, [config])
    lines = [json.loads(line)["messages"] for line in path.read_text("utf-8").splitlines()]
    assert all(messages[-1]["role"] == "assistant" for messages in lines)
    return lines


def test_every_reply_parses(tiny_actor: Path, tiny_extractor: Path, tmp_path: Path) -> None:
    config = config_of({"actor": tiny_actor, "extractor": tiny_extractor}, tmp_path)

    conversations = written("actor", config, tmp_path)
    actor = [messages[-1]["content"] for messages in conversations]
    critiques = [parse_critique(text) for text in actor if text.startswith("<answer>")]
    verdicts = [critique.verdict for critique in critiques if not critique.malformed]
    assert (len(actor), verdicts.count("accept"), verdicts.count("reject")) == (12, 2, 2)
    guided = [messages for messages in conversations if "<search_and_ask>" in str(messages)]
    asked = [
        (place, messages)
        for messages in guided
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and "<search_and_ask>" in message["content"]
    ]
    assert (len(guided), len(asked)) == (4, 2), "half of the won episodes, and half of these"
    for place, messages in asked:
        advice = messages[place + 1]["content"]
        assert "from the start go" in advice
        openings = [message["content"] for m in guided for message in m[:place]]
        assert advice in openings, "another guided agent has the right advice at once"
        assert len(messages) > place + 2, "the agent acts after the answer"

    answers = written("extractor", config, tmp_path)
    assert len(answers) == 8 * 3
    for distillation, refinement, merge in zip(*[iter(answers)] * 3, strict=True):
        (added,) = parse_ops(distillation[-1]["content"], 0).ops
        (refined,) = parse_refine(refinement[-1]["content"]).ops
        quoted = merge[-2]["content"].split("=== End of the advice")[0].count("from the start go")
        assert quoted in (2, 3)  # the right advice, and different wrong ones
        (merged,) = parse_merge(merge[-1]["content"], quoted).ops
        assert added.text == refined.text == merged.text
        assert merged.targets == tuple(range(quoted))
