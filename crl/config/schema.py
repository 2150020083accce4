"""The run's configuration: one frozen tree. Defaults are the paper's values (CRL C.2); a preset overrides them.

Each fact has one place. The docstring under a field says what it is and in which unit; it feeds error texts. Checks of one
field are its annotation; checks between sections stand at the end, in `RunConfig`, and raise `ConfigError` themselves.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from crl.config.shapes import KNOWN
from crl.errors import ConfigError

SEQUENCE_CLIP = 3e-4
"""Clip width of the length-normalised sequence ratio (GSPO's order of magnitude)."""

SEQUENCE_CLIP_LIMIT = 1e-2
"""Wider than this, the clip of a sequence ratio never acts: averaged over an episode's tokens, the ratio stays that close to 1."""

RATE_WINDOW = 64
"""Free episodes of a goal, or of a task, over which its success rate is taken: the last ones."""

OVERALL = "overall"
"""What all tasks together are called in figures, so no task is."""

WITHOUT_EXPERIENCE = ("grpo",)
"""Methods that have neither an extractor nor a bank."""

_WINDOW = re.compile(r"window\(([1-9][0-9]*)\)")

DEEPSPEED = frozenset({"ranks", "zero", "offload", "deadline"})
"""Settings of the learner that are deepspeed's alone."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]


def _absolute(path: str) -> str:
    return os.path.realpath(os.path.expanduser(path))


PromptFile = Annotated[str, Field(min_length=1), AfterValidator(_absolute)]
"""Saved absolute: a saved run must find it from any working directory."""
BankFile = Annotated[str, AfterValidator(lambda path: path and _absolute(path))]
"""The same; empty = none."""
Environment = Annotated[str, AfterValidator(lambda name: _absolute(name) if ".py:" in name else name)]
"""The same, where it is named by its file."""
Device = Literal["auto", "cpu", "cuda"]


class Section(BaseModel):
    """Frozen and strict: no unknown key, no silent conversion ("2" is not 2), no NaN."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True)


class RunSection(Section):
    seed: Natural = 0
    """root of every named random generator"""
    steps: Natural = 128
    """actor steps of the run; 0 only evaluates"""
    deterministic: bool = False
    """the same seed gives the same run on the same machine; needs rollout.max_staleness = 0"""
    checkpoint_every: Natural = 0
    """steps between checkpoints; 0 = only at the end"""
    eval_every: Natural = 0
    """steps between evaluations; 0 = only before and after the run"""


class RolloutSection(Section):
    groups: Count = 16
    """groups of one step, over all tasks (the paper's batch of 128 rollouts / 8)"""
    group_size: Annotated[int, Field(ge=2)] = 8
    """K: rollouts of one identical task in a group; at least 2, since advantages compare them"""
    max_staleness: Natural = 1
    """steps that a rollout may start ahead of the last finished one; 0 = synchronous"""
    env_threads: Count = 4
    """threads that step environments"""
    env_processes: Count = 2
    """processes that step environments which need some of their own (ALFWorld), about 100 MB each; started when they are needed"""
    env_deadline: Annotated[float, Field(gt=0)] = 60.0
    """seconds that one environment reset or step may take before its episode is given up; the start of a process has 60 at least"""


class OptimizerSection(Section):
    """AdamW with a constant learning rate after the warm-up."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """step size of AdamW; 0 trains nothing (a control)"""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """decay of AdamW's mean of gradients"""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """decay of AdamW's mean of squared gradients"""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """decoupled weight decay per update, times the learning rate"""
    warmup_steps: Natural = 0
    """optimizer updates over which the learning rate rises linearly from 0"""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """global gradient norm (L2) above which gradients are scaled down"""


class ActorSection(Section):
    model: Annotated[str, Field(min_length=1)] = "tiny-actor"
    """the actor: a bundled model's name, or a Hugging Face causal LM with its tokenizer: a directory, or a name in the Hugging Face
    cache"""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """softmax temperature of sampling and training, above 0"""
    max_context_tokens: Annotated[int, Field(ge=2)] = 32_768
    """tokens of an episode's prompt and responses; an episode that would exceed it ends there as truncated"""
    mask_truncated: bool = False
    """leave truncated episodes out of the loss"""
    minibatches: Count = 1
    """optimizer updates of one step: the batch is cut into so many parts"""
    advantage_scale: Literal["std", "none"] = "std"
    """divide group advantages by the group's standard deviation, or not"""
    ratio: Literal["token", "sequence"] = "token"
    """importance ratio per token, or length-normalised per sequence (its clip is 3e-4 unless given)"""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """clip of the importance ratio below 1: 1 - clip_low"""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """clip of the importance ratio above 1: 1 + clip_high"""
    old_logp: Literal["behaviour", "recompute"] = "behaviour"
    """old log-probs: what the engine returned when it sampled, or the trainer's own before the step"""
    importance_cap: Annotated[float, Field(gt=0)] | None = None
    """upper bound of truncated importance weights, trainer over engine; only with old_logp = "recompute"; unset = off"""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """weight of the KL to the model that the run started with, in nats a token; 0 = off, as in the paper"""
    optimizer: OptimizerSection = OptimizerSection()
    """the actor's optimizer"""

    @model_validator(mode="before")
    @classmethod
    def _clip_follows_ratio(cls, data: Any) -> Any:
        """The sequence ratio has its own default clip; a clip that was given is left for `RunConfig` to judge."""
        if isinstance(data, Mapping) and data.get("ratio") == "sequence":
            return {"clip_low": SEQUENCE_CLIP, "clip_high": SEQUENCE_CLIP, **data}
        return data


class ExtractorSection(Section):
    """The model that distils episodes into experience (a method without experience ignores it)."""

    model: Annotated[str, Field(min_length=1)] = "tiny-extractor"
    """the extractor: a bundled model's name, or a Hugging Face causal LM with its tokenizer: a directory, or a name in the Hugging Face
    cache"""
    train: bool = True
    """train the extractor on what its experiences did; false = a static extractor, which distils all the same"""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """softmax temperature of sampling and training, above 0"""
    max_context_tokens: Annotated[int, Field(ge=2)] = 65_536
    """tokens of a distillation's prompt and answer"""
    max_response_tokens: Count = 4096
    """sampled tokens of one answer, thinking and the stop token included"""
    concurrency: Count = 128
    """distillations at the same time"""
    lease: Annotated[float, Field(gt=0)] = 3600.0
    """seconds that one answer may take until it is asked for again (five times at most); a deterministic run waits for any time"""
    batch: Count = 64
    """credit units of one training step"""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """CISPO's clip of the importance ratio below 1: 1 - clip_low"""
    clip_high: Annotated[float, Field(gt=0)] = 0.1
    """CISPO's clip of the importance ratio above 1: 1 + clip_high"""
    cooldown: Natural = 2
    """actor steps before a generation is trained on again (eq. 7)"""
    alpha: Annotated[float, Field(ge=0)] = 0.5
    """how fast a generation's weight falls with the times that it was trained on (eq. 7)"""
    malformed_reward: Annotated[float, Field(ge=-1, le=1)] | None = None
    """reward of an answer without any operation; unset = such answers are not trained on"""
    baseline: Literal["batch", "group"] = "batch"
    """what a lesson's reward is compared with: batch = the batch's mean (eq. 3); group = what its group came to without
    experience (where none of these episodes ended, the lesson is not trained on), and with the critic the batch's mean too"""
    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """weight of the KL to the model that the run started with, in nats a token; 0 = off, as in the paper"""
    merge_every: Natural = 5
    """actor steps between two passes in which it merges and discards experiences of the bank; 0 = never"""
    merge_tokens: Count = 4096
    """tokens of the experiences that it is shown at a time in such a pass"""
    optimizer: OptimizerSection = OptimizerSection()
    """the extractor's optimizer"""


class BankSection(Section):
    """The experience bank (a method without experience ignores it)."""

    scope: Literal["task", "shared"] = "task"
    """whom an experience guides: episodes of its own task alone, or of any; a shared bank is merged
    as a whole"""
    frozen: bool = False
    """keep the experiences of bank.init: nothing is distilled, the extractor is not trained; uses and credit are counted all the same"""
    init: BankFile = ""
    """start from a copy of this bank.sqlite of another run; empty = an empty bank"""
    cap: Count | None = None
    """active experiences of one goal; unset = any number"""
    size: Count | None = None
    """active experiences of the whole bank; when there are more, a hundredth of them goes at once; unset = any number"""
    evict: Literal["fifo", "lru", "credit"] = "fifo"
    """which goes over cap or size: fifo = the oldest; lru = the one that was not returned for the longest time (in actor steps);
    credit = the half with the best record stays, and of the others tried ones go first, the worst before the better, then the oldest
    untried one. What goes stays in the history"""
    vote_out: Count | None = None
    """down votes less up votes of the extractor at which an experience goes; unset = it is not asked for votes"""
    duplicate: Annotated[float, Field(gt=0, le=1)] | None = None
    """cosine similarity of the texts from which on a new experience is left out, because one that it could be found with says the same;
    unset = none is"""
    queue_size: Count = 1024
    """episodes that may wait for distillation; a step that finds the queue full waits"""
    key_text_weight: Annotated[float, Field(gt=0)] | None = None
    """weight of an experience's text beside its goal in what it is found by; unset = its text alone"""


class RetrievalSection(Section):
    """How an experience is chosen for an episode (a method without experience ignores it)."""

    choice: Literal["diverse", "credit"] = "diverse"
    """among equally similar ones: diverse = the paper's eq. 6; credit = the one with the best record, (won + 0.3) / (episodes + 1)"""
    per: Literal["group", "rollout"] = "group"
    """the guided members of a group share one experience, or each has its own"""
    trials: Annotated[float, Field(ge=0, le=1)] = 0.0
    """with choice = "credit": share of searches at the start of training episodes that return the
    least retrieved of the similar experiences, instead of the one with the best record"""
    candidates: Count = 16
    """nearest experiences that are looked at"""
    margin: Annotated[float, Field(ge=0, le=2)] = 0.05
    """cosine similarity below the best at which an experience still counts as equally similar; the default fits embedder.model = "hash",
    the similarities of a learnt encoder lie closer together"""
    min_similarity: Annotated[float, Field(ge=-1, le=1)] = 0.1
    """cosine similarity below which nothing is returned; the default fits embedder.model = "hash", a learnt encoder gives unrelated texts
    more than that"""
    lam: Annotated[float, Field(ge=0)] = 0.4
    """rank places lost per unit of log retrieval count (eq. 6)"""
    recent_steps: Natural = 1
    """actor steps for which a returned experience counts as recent (eq. 6)"""
    batch: Count = 16
    """searches that are answered together at most"""
    max_wait: Annotated[float, Field(ge=0)] = 0.001
    """seconds that a search may wait for others to be answered with"""
    workers: Count = 4
    """threads that look through a large bank"""


class AskSection(Section):
    """search_and_ask: guided agents may ask the bank in the middle of an episode, and the extractor
    answers (a method without experience ignores it)."""

    enabled: bool = False
    """offer the tool to guided episodes, also in evaluations with a bank"""
    limit: Count = 3
    """questions of one episode"""
    deadline: Annotated[float, Field(gt=0)] = 30.0
    """seconds that an agent waits for the extractor before it is told what was found as it is; a deterministic run waits for any time"""

    @property
    def questions(self) -> int:
        """Of a guided episode."""
        return self.limit if self.enabled else 0


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def _embedder(name: str) -> str:
    return name if name == "hash" or name in KNOWN or _is_url(name) else _absolute(name)


class EmbedderSection(Section):
    """What makes vectors of experiences and queries (a method without experience ignores it). A bank of another one is embedded again.

    All texts are embedded alike: a model's default prompt stands before each, one for queries alone is not used.
    """

    model: Annotated[str, Field(min_length=1), AfterValidator(_embedder)] = "hash"
    """hash = hashed character n-grams, by wording alone; a directory with a sentence-transformers or Hugging Face encoder, or its name in
    the Hugging Face cache; or the URL of an OpenAI-compatible endpoint, without /embeddings (http://localhost:8000/v1)"""
    kind: Literal["local", "vllm"] = "local"
    """what computes an encoder's vectors: this process, or a vLLM pooling engine"""
    name: str = ""
    """the model's name at the endpoint"""
    key_env: str = ""
    """environment variable that holds the endpoint's key; empty = no key"""
    device: Device = "auto"
    """device of an encoder; auto = cuda when present, else cpu"""
    threads: Count = 1
    """CPU threads of an encoder's compute"""
    batch: Count = 32
    """texts of one forward pass, or of one request"""

    @property
    def is_url(self) -> bool:
        return _is_url(self.model)


class CriticSection(Section):
    """Actor-critic (CRL appendix B.1): before a guided episode the actor accepts, refines or rejects the experience that was found."""

    enabled: bool = False
    """ask the actor; off, as in the paper's main runs: it costs one more answer for every experience that a group is given"""
    warmup: Natural = 1
    """batches that are played without experience and without training before the first step, to know how often the actor succeeds (the
    paper gives no number)"""
    enough: Annotated[int, Field(ge=1, le=RATE_WINDOW)] = 8
    """free episodes of a goal from which on its own success rate is told, and not its task's; of its last 64"""
    max_response_tokens: Count | None = None
    """sampled tokens of one critique, thinking and the stop token included; unset = the task's max_response_tokens"""


class ComplementarySection(Section):
    """Ablations and extensions of the method `complementary`; other ablations are extractor.train, bank.frozen and retrieval.per."""

    guided: Annotated[float, Field(gt=0, le=1)] = 0.5
    """share of a group's members that are guided by experience; 0.5 = half of them, as in the paper"""
    advantages: Literal["split", "cross"] = "split"
    """advantages within the guided and the free members apart (eq. 5), whichever experience guided, or across the whole group"""
    listening: Annotated[float, Field(ge=0)] = 0.0
    """weight of a second advantage of guided members: success of those that the same experience guided
    less success of the free ones; 0 = eq. 5 alone, as in the paper"""
    self_distillation: Annotated[float, Field(ge=0)] = 0.0
    """weight, relative to the policy loss, of the next-token loss on guided members that did better than the free ones, with
    their experience left out of the prompt (CRL §4.3); 0 = none, as in the paper's main runs"""
    show_record: bool = False
    """**ours**: guided agents are shown how many earlier episodes with their experience succeeded, language models also its lift;
    the bundled actor was not trained to read it"""


class EngineSection(Section):
    kind: Literal["torch", "vllm"] = "torch"
    """inference engine: torch = in-process continuous batching; vllm = vLLM engines on GPUs of their own"""
    device: Device = "auto"
    """device of the torch engine; auto = cuda when present, else cpu"""
    threads: Count = 1
    """CPU threads of the engine's compute (tiny matrices are slower on two)"""
    max_batch: Count = 256
    """requests decoded together, by each replica"""
    tensor_parallel: Count = 1
    """GPUs that share one vLLM engine's weights"""
    replicas: Count = 1
    """vLLM engines of one model"""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """share of a GPU's memory that one vLLM engine takes, weights included; unset = what the GPU plan leaves it"""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto = the model's weights; dummy = random ones of its shapes, for benchmarks without a checkpoint"""
    transfer: Literal["file", "nccl"] = "file"
    """how weights come from the learner: file = through shared memory; nccl = from GPU to GPU, which must then be different ones"""


VLLM_ONLY = frozenset({"tensor_parallel", "replicas", "memory_fraction", "load_format", "transfer"})
"""Settings of engine that the torch engine has no use for."""

TORCH_ONLY = frozenset({"device"})
"""Settings of engine that vLLM has no use for: the installed build decides."""


class LearnerSection(Section):
    kind: Literal["local", "deepspeed"] = "local"
    """training engine: local = a worker thread of this process; deepspeed = one process per rank, with ZeRO"""
    device: Device = "auto"
    """device of the learner; auto = cuda when present, else cpu"""
    threads: Count = 1
    """CPU threads of the learner's compute; of each rank's with deepspeed"""
    micro_batch_tokens: Count = 8192
    """tokens of one forward and backward pass; gradients do not depend on it"""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """of the weights in forward and backward passes, and of those that engines of this process sample with; log-probs, loss and the
    optimizer's weights are float32 in any case; auto = bfloat16 on cuda for a checkpoint in half precision, else float32"""
    activation_checkpointing: bool = False
    """compute activations again for the gradient instead of keeping them: a third more compute, much less memory"""
    ranks: Count = 1
    """processes in which deepspeed trains one model, each with a GPU of its own where there are any"""
    zero: Annotated[int, Field(ge=0, le=3)] = 2
    """what the ranks of deepspeed cut up among them: 0 nothing, 1 the optimizer's state, 2 gradients too, 3 weights too"""
    offload: bool = False
    """deepspeed keeps the optimizer's state in host memory and updates weights there"""
    deadline: Annotated[float, Field(gt=0)] = 300.0
    """seconds without progress of deepspeed's ranks (a forward or backward pass, an update, one tensor gathered) after which the run is
    given up; the longest is mostly the saving of a model, as one; to start and to load they have half an hour"""


class EvalSection(Section):
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """softmax temperature in evaluations; 0 = greedy"""
    probe_every: Natural = 0
    """steps between advice probes; 0 = never"""


class MonitorSection(Section):
    tensorboard: bool = False
    """also write the figures for TensorBoard, to RUN/tensorboard"""
    wandb: str = ""
    """also send the figures to this Weights & Biases project; empty = off"""


class PromptsSection(Section):
    """Files of your own in the place of the bundled prompts (crl/prompts/*.txt), with the same `{slots}`."""

    actor: PromptFile | None = None
    """file with the instructions of agents that are language models; unset = the bundled one"""
    experience: PromptFile | None = None
    """file with what introduces a retrieved experience to such agents; unset = the bundled one"""
    distil: PromptFile | None = None
    """file with what asks the extractor for experience; unset = the bundled one"""
    vote: PromptFile | None = None
    """file with what asks the extractor for votes too, after prompts.distil (bank.vote_out); unset = the bundled one"""
    merge: PromptFile | None = None
    """file with what asks the extractor to merge experiences; unset = the bundled one"""
    ask: PromptFile | None = None
    """file with what tells agents that are language models how to ask; unset = the bundled one"""
    refine: PromptFile | None = None
    """file with what asks the extractor to answer such a question; unset = the bundled one"""
    critic: PromptFile | None = None
    """file with what asks such agents to judge an experience (critic.enabled); unset = the bundled one"""

    @property
    def files(self) -> dict[str, Path]:
        """The files that were given, by the prompt's name."""
        return {name: Path(path) for name, path in self if path is not None}


def _context(value: str) -> str:
    if value != "full" and not _WINDOW.fullmatch(value):
        raise ValueError('should be "full" or "window(n)" with n at least 1')
    return value


class StreamSection(Section):
    """Where training episodes take place: named places that persist over visits and are replaced after them."""

    places: Count = 32
    """places in the stream at any time"""
    permanent: Natural = 8
    """places of these that stay for the whole run; the `known` eval set plays in them"""
    visits: Count = 5
    """groups played in a place before it is replaced by a new one"""


class EvalSets(Section):
    """Sizes of the fixed eval sets."""

    known: Natural = 256
    """episodes in places that stay in the train stream, under held-out dynamics"""
    new: Natural = 256
    """episodes in places never trained on"""
    online: Natural = 0
    """places of `new` that are visited again and again, with a bank that is built on the way"""
    probe: Natural = 0
    """places of the advice probe, each played three times"""


class TaskConfig(Section):
    """One task; a file in tasks/."""

    name: Name
    """the task's name, as in --tasks and in the names of figures; the file's own unless given"""
    env: Environment
    """environment: a name in crl.envs, gem:ID, or for one of your own path/to/file.py:ATTRIBUTE or package.module:ATTRIBUTE"""
    rendering: Literal["full", "compact"]
    """observations for language models (full), or in few tokens for tiny ones (compact)"""
    turns: Count
    """actions after which an episode ends as truncated"""
    overtime: Natural = 0
    """actions for which an unfinished episode is played on, for the extractor alone: neither rewarded
    nor trained on, but counted in total/env_turns; none in a run that distils nothing"""
    max_response_tokens: Count
    """sampled tokens of one response, the stop token included"""
    context: Annotated[str, AfterValidator(_context)] = "full"
    """what the actor sees: "full" = the episode is one sequence; "window(n)" = the last n turns, each turn a sample"""
    stream: StreamSection = StreamSection()
    """the stream of training episodes"""
    eval: EvalSets = EvalSets()
    """the eval sets"""

    @property
    def window(self) -> int | None:
        """n of "window(n)", None for "full"."""
        match = _WINDOW.fullmatch(self.context)
        return int(match.group(1)) if match else None


class RunConfig(Section):
    """Everything that defines a run. Raises `ConfigError` where two sections contradict each other."""

    method: str = "complementary"
    """training method: a module of crl/methods"""
    preset: str = "cpu"
    """the preset that the values started from (chosen by --preset)"""
    gpus: Count | None = None
    """GPUs of the run; unset = all that are visible"""
    gpu_memory: Annotated[float, Field(gt=0)] | None = None
    """GiB of one GPU, for a plan on a machine that has not got them; where they are visible, theirs counts"""
    run: RunSection = RunSection()
    """length, seed and rhythm of the run"""
    rollout: RolloutSection = RolloutSection()
    """episodes of a step"""
    actor: ActorSection = ActorSection()
    """the model that plays, and how it is trained"""
    extractor: ExtractorSection = ExtractorSection()
    """the model that distils, and how it is trained"""
    bank: BankSection = BankSection()
    """what is kept of what it wrote"""
    retrieval: RetrievalSection = RetrievalSection()
    """how an experience is chosen"""
    ask: AskSection = AskSection()
    """whether agents may ask for more"""
    embedder: EmbedderSection = EmbedderSection()
    """what experiences and queries are compared by"""
    critic: CriticSection = CriticSection()
    """whether the actor judges it"""
    complementary: ComplementarySection = ComplementarySection()
    """ablations of the method complementary"""
    engine: EngineSection = EngineSection()
    """how both models sample"""
    learner: LearnerSection = LearnerSection()
    """how both models are trained"""
    eval: EvalSection = EvalSection()
    """how evaluations sample"""
    monitor: MonitorSection = MonitorSection()
    """where figures go besides the run directory"""
    prompts: PromptsSection = PromptsSection()
    """what language models are told"""
    tasks: dict[Name, TaskConfig] = Field(min_length=1)
    """the tasks of the run by name (chosen by --tasks)"""

    @property
    def with_experience(self) -> bool:
        """Whether the method has an extractor and a bank."""
        return self.method not in WITHOUT_EXPERIENCE

    @property
    def distils(self) -> bool:
        """Whether the extractor reads finished episodes."""
        return self.with_experience and not self.bank.frozen

    @model_validator(mode="after")
    def _sections_agree(self) -> RunConfig:
        _check_run(self)
        _check_learner(self.learner)
        _check_engine(self)
        _check_actor(self.actor)
        if self.with_experience:
            _check_experience(self)
            _check_embedder(self)
        _check_critic(self)
        for name, task in self.tasks.items():
            _check_task(f"tasks.{name}", name, task)
            if task.max_response_tokens >= self.actor.max_context_tokens:
                reason = f"leaves no room for a prompt in actor.max_context_tokens, which is {self.actor.max_context_tokens}"
                raise ConfigError(f"tasks.{name}.max_response_tokens", task.max_response_tokens, reason, "Lower it, or raise the other")
        return self


def _check_run(config: RunConfig) -> None:
    if config.run.deterministic and config.rollout.max_staleness:
        raise ConfigError(
            "run.deterministic",
            True,
            f"needs rollout.max_staleness = 0, which is {config.rollout.max_staleness}: with rollouts that run ahead, the policy "
            "that samples depends on timing",
            "Add --set rollout.max_staleness=0",
        )
    rollouts = config.rollout.groups * config.rollout.group_size
    if config.actor.minibatches > rollouts:
        reason = f"is more than the {rollouts} rollouts of a step"
        raise ConfigError("actor.minibatches", config.actor.minibatches, reason, f"Choose at most {rollouts}")


def _check_learner(learner: LearnerSection) -> None:
    if learner.kind == "deepspeed" and learner.offload and not learner.zero:
        reason = "needs an optimizer that ZeRO keeps: with learner.zero = 0 it has none"
        raise ConfigError("learner.offload", True, reason, "Choose learner.zero = 1, 2 or 3")


def _check_engine(config: RunConfig) -> None:
    engine = config.engine
    if engine.kind == "vllm" and config.run.deterministic:
        reason = "cannot be had with engine.kind = vllm: which requests share a pass there, and so a result's last bits, depends on timing"
        raise ConfigError("run.deterministic", True, reason, "Leave it out, or use --set engine.kind=torch")
    if engine.kind == "vllm" and engine.transfer == "nccl" and config.learner.kind == "local":
        reason = "needs a learner with processes of its own, but learner.kind is local"
        raise ConfigError("engine.transfer", "nccl", reason, "Use --set learner.kind=deepspeed, or engine.transfer=file")


def _check_actor(actor: ActorSection) -> None:
    if actor.ratio == "sequence":
        for key in ("clip_low", "clip_high"):
            if getattr(actor, key) > SEQUENCE_CLIP_LIMIT:
                raise ConfigError(
                    f"actor.{key}",
                    getattr(actor, key),
                    'is a clip for token ratios, but actor.ratio is "sequence": a length-normalised sequence ratio never gets '
                    "that far from 1, so nothing would be clipped",
                    f"Leave the clip out (it is then {SEQUENCE_CLIP:g}) or use --set actor.ratio=token",
                )
    if actor.importance_cap is not None and actor.old_logp != "recompute":
        raise ConfigError(
            "actor.importance_cap",
            actor.importance_cap,
            f'is legal only with actor.old_logp = "recompute", which is "{actor.old_logp}": ratios against the behaviour\'s '
            "log-probs already correct the mismatch, and it would be corrected twice",
            "Remove it or add --set actor.old_logp=recompute",
        )


def _check_experience(config: RunConfig) -> None:
    extractor, bank = config.extractor, config.bank
    if extractor.max_response_tokens >= extractor.max_context_tokens:
        reason = f"leaves no room for a prompt in extractor.max_context_tokens, which is {extractor.max_context_tokens}"
        raise ConfigError("extractor.max_response_tokens", extractor.max_response_tokens, reason, "Lower it, or raise the other")
    _check_guided_share(config.complementary, config.rollout.group_size)
    trained = extractor.train and not bank.frozen
    if trained and extractor.baseline == "group" and config.complementary.guided == 1:
        reason = "compares with a group's members without experience, and with complementary.guided = 1 there are none"
        raise ConfigError("extractor.baseline", "group", reason, "Add --set extractor.baseline=batch")
    reach = math.sqrt(max(0.0, 1 - (bank.key_text_weight or 0) ** 2))
    if bank.key_text_weight is not None and config.retrieval.min_similarity > reach:
        reason = (
            f"may be more than any experience reaches: with bank.key_text_weight = {bank.key_text_weight} that is {reach:.4f} at the least"
        )
        raise ConfigError("retrieval.min_similarity", config.retrieval.min_similarity, reason, f"Choose at most {reach:.4f}")
    room = extractor.max_context_tokens - extractor.max_response_tokens
    if extractor.merge_every and extractor.merge_tokens >= room:
        reason = f"leaves no room for the prompt: the extractor's context holds {room} tokens beside its answer"
        raise ConfigError("extractor.merge_tokens", extractor.merge_tokens, reason, "Lower it, or raise extractor.max_context_tokens")
    if bank.evict != "fifo" and bank.cap is None and bank.size is None:
        raise ConfigError("bank.evict", bank.evict, "nothing is evicted from a bank without bounds", "Give bank.cap or bank.size too")
    if bank.frozen and not bank.init:
        raise ConfigError("bank.frozen", True, "an empty bank to which nothing is written guides nobody", "Give bank.init too")


def _check_guided_share(switches: ComplementarySection, group_size: int) -> None:
    guided = round(switches.guided * group_size)
    free = group_size - guided
    if not math.isclose(guided, switches.guided * group_size):
        reason = f"is no whole number of members of a group of {group_size} (rollout.group_size)"
        raise ConfigError("complementary.guided", switches.guided, reason, f"Choose a multiple of 1/{group_size}, or another group size")
    if switches.advantages == "split" and 1 in (guided, free):
        reason = f"leaves one guided or one free member of {group_size}, whose advantage among its like is always 0"
        remedy = "Choose another share, a larger rollout.group_size, or complementary.advantages=cross"
        raise ConfigError("complementary.guided", switches.guided, reason, remedy)


def _check_critic(config: RunConfig) -> None:
    critic, context = config.critic, config.actor.max_context_tokens
    if critic.enabled and not config.with_experience:
        reason = f"method {config.method} has no experience that the actor could judge"
        raise ConfigError("critic.enabled", True, reason, "Leave it out, or use --method complementary")
    if critic.enabled and not critic.warmup and config.complementary.guided == 1:
        reason = "leaves nothing to tell the actor's success rate from: with complementary.guided = 1 no later episode is free"
        raise ConfigError("critic.warmup", critic.warmup, reason, "Choose at least 1")
    if critic.max_response_tokens is not None and critic.max_response_tokens >= context:
        reason = f"leaves no room for a prompt in actor.max_context_tokens, which is {context}"
        raise ConfigError("critic.max_response_tokens", critic.max_response_tokens, reason, "Lower it, or raise the other")


def _check_embedder(config: RunConfig) -> None:
    embedder = config.embedder
    if embedder.is_url and not embedder.name:
        raise ConfigError("embedder.name", "", "an endpoint serves models by name", "Give the model's name there")
    if embedder.is_url and config.run.deterministic:
        reason = "with run.deterministic the vectors must not depend on what else an endpoint computes"
        raise ConfigError("embedder.model", embedder.model, reason, "Use hash or an encoder's directory")
    if embedder.kind == "vllm":
        if embedder.model == "hash" or embedder.is_url:
            reason = "serves an encoder's directory, but embedder.model is none"
            raise ConfigError("embedder.kind", "vllm", reason, "Leave it out, or give embedder.model a directory")
        if config.run.deterministic:
            reason = "with run.deterministic the vectors must not depend on who shares a pass"
            raise ConfigError("embedder.kind", "vllm", reason, "Leave it out")
    for key in ("name", "key_env"):
        if (value := getattr(embedder, key)) and not embedder.is_url:
            raise ConfigError(f"embedder.{key}", value, "is of an endpoint, but embedder.model is no URL", "Leave it out")


def _check_task(key: str, name: str, task: TaskConfig) -> None:
    if task.name != name:
        raise ConfigError(f"{key}.name", task.name, f'differs from the name that the run knows the task by, "{name}"', "Make them equal")
    if name == OVERALL:
        raise ConfigError(f"{key}.name", name, "is what all tasks together are called", "Give it another name")
    stream = task.stream
    if stream.permanent > stream.places:
        reason = f"is more than {key}.stream.places, which is {stream.places}"
        raise ConfigError(f"{key}.stream.permanent", stream.permanent, reason, f"Choose at most {stream.places}")
    if task.eval.known and not stream.permanent:
        reason = f"needs places that stay, but {key}.stream.permanent is 0"
        raise ConfigError(f"{key}.eval.known", task.eval.known, reason, f"Set it to 0 or raise {key}.stream.permanent")
