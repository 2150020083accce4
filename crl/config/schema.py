"""Schema of a run's configuration: one frozen tree of sections.

The defaults are the values of the paper (CRL C.2). A preset overrides them.

Each fact is stored in one place. The docstring under a field is its description: the meaning of the
value, its unit, and its special values. Error messages quote the description. Constraints on a
single field are part of its annotation. Checks that involve several sections are at the end of this
module. They are called by `RunConfig` and raise `ConfigError` themselves.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, create_model, model_validator

from crl.config.method import MethodSpec, Part, method_spec
from crl.config.models import Profile, profile_of
from crl.config.models.shapes import PUBLISHED_SHAPES
from crl.config.retrieval import BUNDLED_POLICIES, retrieval_policy
from crl.config.section import Count, Name, Natural, NonNegative, Section, Share
from crl.errors import ConfigError
from crl.plugins import absolute_reference
from crl.types import PerplexityNormaliser, RewardBaseline, RoleName, StreamSettings

SEQUENCE_CLIP = 3e-4
"""Default clip width of the length-normalised sequence ratio (the order of magnitude of GSPO)."""

SEQUENCE_CLIP_LIMIT = 1e-2
"""Largest clip width that is accepted for a sequence ratio.

The ratio is averaged over the tokens of an episode and stays so close to 1 that a wider clip never
takes effect.
"""

ASYMMETRIC_CLIP = 0.2
"""Default largest penalty of the asymmetric normaliser, a fifth of its largest bonus."""

RATE_WINDOW = 64
"""Number of most recent free episodes of a goal or task over which a success rate is taken."""

OVERALL = "overall"
"""Name of the aggregate over all tasks in metric names. No task may have this name."""

_WINDOW = re.compile(r"window\(([1-9][0-9]*)\)")


def _absolute_path(path: str) -> str:
    """Return the absolute path, with `~` expanded and symbolic links resolved."""
    return os.path.realpath(os.path.expanduser(path))


PromptFile = Annotated[str, Field(min_length=1), AfterValidator(_absolute_path)]
"""Path of a prompt file.

It is saved as an absolute path, so that a saved run can be loaded from any working directory.
"""
BankFile = Annotated[str, AfterValidator(lambda path: path and _absolute_path(path))]
"""Path of a bank file, made absolute like a `PromptFile`. Empty = none."""
Reference = Annotated[str, AfterValidator(absolute_reference)]
"""Bundled name, or reference to a user's object (see `crl.plugins`)."""
Scope = Literal["variation", "goal", "task", "shared"]
"""Range of episodes that an experience may guide, see `BankSection.scope`."""

GOAL_SCOPES: frozenset[Scope] = frozenset({"variation", "goal"})
"""Scopes in which an experience guides only episodes with its own goal."""
EvictionOrder = Literal["fifo", "lru", "credit"]
"""Eviction order of experiences, see `BankSection.evict`."""
Device = Literal["auto", "cpu", "cuda"]
"""Device of an engine, a learner or an encoder. auto = cuda if available, else cpu."""


class RunSection(Section):
    """Length, seed and schedule of a run."""

    seed: Natural = 0
    """Seed from which the seed of every random generator in the run is derived."""
    steps: Natural = 128
    """Number of actor steps in the run. 0 = evaluate only."""
    deterministic: bool = False
    """Reproducibility: the same seed gives the same run on the same machine.

    Requires rollout.max_staleness = 0. Not available with engine.kind = "vllm".
    """
    checkpoint_every: Natural = 25
    """Number of actor steps between two checkpoints. 0 = by checkpoint_minutes alone.

    The end of a run always writes a checkpoint.
    """
    checkpoint_minutes: NonNegative = 10.0
    """Maximum number of minutes between two checkpoints. 0 = by checkpoint_every alone.

    A deterministic run ignores it, because a checkpoint adds a row to the bank's log.
    """
    keep_last: Count = 2
    """Number of the last checkpoints that are kept."""
    keep_every: Natural = 0
    """Number of actor steps between two checkpoints that are kept for good. 0 = none."""
    keep_episodes: Natural = 0
    """Number of the last actor steps whose episodes are kept in RUN/episodes. 0 = all."""
    max_error_rate: Share = 0.5
    """Maximum share of errors among the last 256 episodes of a task.

    A run that exceeds it ends, from 64 episodes on. A run also ends if the first 16 episodes of a
    task all have an error, or if a task has had no episode without an error by the end of a step;
    a single group does not count here while other tasks work. Episodes are counted in the order
    of their starts.
    """
    stall_seconds: NonNegative = 600.0
    """Seconds without a finished episode, training step or distillation until a warning. 0 = never.

    log.txt then shows where each part of the run waits, or has the stack of a blocked event loop.
    """
    stall_ends_run: bool = False
    """True: a run without progress for stall_seconds ends with an error."""
    eval_every: Natural = 0
    """Number of actor steps between two evaluations.

    0 = only before the first step and after the last one.
    """


class RolloutSection(Section):
    """Collection of training episodes: batch size, staleness and environment workers."""

    groups: Count = 16
    """Number of groups in one step, summed over all tasks.

    The paper uses batches of 128 rollouts, which is 16 groups of 8.
    """
    group_size: Annotated[int, Field(ge=2)] = 8
    """Number K of rollouts of one identical task in a group.

    At least 2, because advantages compare the members of a group.
    """
    max_staleness: Natural = 1
    """Maximum number of steps that collection may run ahead of training.

    0 = synchronous: the rollouts of a step start when the previous step is completed.
    """
    env_threads: Count = 4
    """Number of threads that run environments in this process."""
    env_processes: Count = 2
    """Maximum number of worker processes for environments that need their own process (ALFWorld).

    A worker process takes about 100 MB and is started when it is first needed.
    """
    env_timeout: Annotated[float, Field(gt=0)] = 60.0
    """Timeout of one environment reset or step, in seconds.

    An episode that exceeds it fails and is not trained on. The creation of an environment in a
    worker process may always take at least 60 s.
    """


class OptimizerSection(Section):
    """Settings of AdamW. The learning rate is constant after the warm-up, unless it decays."""

    learning_rate: NonNegative = 1e-6
    """Learning rate of AdamW after the warm-up. 0 = the weights never change (a control run)."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay rate β₁ of AdamW's running mean of gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay rate β₂ of AdamW's running mean of squared gradients."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay.

    Each update shrinks the weights by this factor times the learning rate.
    """
    warmup_steps: Natural = 0
    """Number of optimizer updates over which the learning rate rises linearly from 0.

    0 = no warm-up.
    """
    decay_steps: Natural = 0
    """Number of optimizer updates, warm-up included, after which the learning rate is 0.

    It falls linearly from its value after the warm-up. Later updates change nothing. 0 = no decay.
    """
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Maximum global L2 norm of the gradient.

    A gradient with a larger norm is scaled down to it.
    """


class LoraSection(Section):
    """Low-rank adapter (LoRA), which is trained instead of the weights of the model."""

    rank: Natural = 0
    """Rank of the adapter's matrices. 0 = all weights of the model are trained.

    It is at most the smallest dimension of the layers that have an adapter.
    """
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """Scale of the adapter: the product of its matrices is multiplied by alpha / rank."""
    targets: str = ""
    """Names of the linear layers that have an adapter, with commas, such as q_proj,v_proj.

    Empty = all linear layers except the output head.
    """

    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability with which an input of an adapter's layer is set to 0 in the passes of an update.

    The other inputs are divided by 1 - dropout. All other passes are without dropout: sampling,
    evaluation, recomputed old log-probs, and the reference of kl_coef. 0 = off.
    """

    @property
    def target_names(self) -> tuple[str, ...]:
        """Names in `targets`."""
        return tuple(name.strip() for name in self.targets.split(",") if name.strip())


class ActorSection(Section):
    """Actor: the model that plays, with its sampling, its loss and its optimizer."""

    model: Annotated[str, Field(min_length=1)] = "tiny-actor"
    """Name or path of the actor model.

    It is a bundled model, a directory with a Hugging Face causal language model and its tokenizer,
    or a model name in the Hugging Face cache.
    """
    profile: Profile | None = None
    """Profile of the model. It selects its prompts and the tables [compact] of presets and tasks.

    full = for language models; compact = few tokens, for models that were trained on such texts.
    Default: as the model's crl.json declares, or full without this file. Checkpoints declare it.
    """
    train: bool = True
    """Training of the actor.

    false = the actor keeps its weights, and only bank and extractor learn (experience only).
    """
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature of sampling and of the training loss. Must be above 0."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass of the most probable tokens that are sampled from, after top_k.

    The loss uses probabilities that are renormalised over these tokens. 1 = all tokens. With
    engine.kind = "vllm", a lower value requires top_k. Evaluations use all tokens.
    """
    top_k: Natural = 0
    """Number of most probable tokens that are sampled from.

    The loss uses probabilities that are renormalised over these tokens. 0 = all tokens. Evaluations
    use all tokens.
    """
    max_context_tokens: Annotated[int, Field(ge=2)] = 32_768
    """Maximum number of tokens in one sequence, prompt and completions together.

    The default is at most the number of positions of the model, if it has 8,192 or more.

    An episode that reaches the limit ends there and counts as truncated.
    """
    mask_truncated: bool = False
    """Exclusion of truncated episodes from the loss.

    false = they are trained on like other episodes.
    """
    minibatches: Count = 1
    """Maximum number of minibatches of a step, each of which is one optimizer update.

    No group is divided, so a step has at most rollout.groups minibatches.
    """
    advantage_scale: Literal["std", "none"] = "std"
    """Scaling of group advantages.

    std = divide by the standard deviation of the rewards that are compared; none = do not divide.
    """
    ratio: Literal["token", "sequence"] = "token"
    """Importance ratio of the policy loss.

    token = one ratio per token; sequence = one length-normalised ratio per sequence (GSPO). With
    "sequence", the default of clip_low and clip_high is 3e-4.
    """
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Lower clip width of the importance ratio. The lower bound is 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Upper clip width of the importance ratio. The upper bound is 1 + clip_high."""
    old_logp: Literal["behaviour", "recompute"] = "behaviour"
    """Source of the old log-probs in the importance ratio.

    behaviour = the log-probs that the engine returned when it sampled; recompute = the trainer's
    own log-probs at the start of the step, but not for empo2's off-policy samples with
    off_policy_old = "with_tips".
    """
    importance_cap: Annotated[float, Field(gt=0)] | None = None
    """Upper bound of the truncated importance weights, trainer over engine.

    Requires old_logp = "recompute". Unset = no importance weights.
    """
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence from the model at the start of the run, per token and in nats.

    0 = off, as in the paper.
    """
    lora: LoraSection = LoraSection()
    """Adapter of the actor."""
    optimizer: OptimizerSection = OptimizerSection()
    """Optimizer of the actor."""

    @model_validator(mode="before")
    @classmethod
    def _set_default_clip(cls, data: Any) -> Any:
        """Set the default clip of a sequence ratio.

        A clip that was given is not changed; `RunConfig` checks it.
        """
        if isinstance(data, Mapping) and data.get("ratio") == "sequence":
            return {"clip_low": SEQUENCE_CLIP, "clip_high": SEQUENCE_CLIP, **data}
        return data


class PerplexitySection(Section):
    """Perplexity-reduction reward (CRL appendix B.2), an auxiliary reward of the extractor.

    An experience earns a bonus if the actor's entropy H over the first observation of an episode is
    lower with the experience in the prompt than without it. H is the mean negative log-prob of the
    observation's tokens in nats, so exp(H) is their perplexity.
    """

    weight: NonNegative = 0.0
    """Weight w of the bonus, beside the reward r = +1 or -1 of the episode.

    0 = off, as in the paper, which found no consistent improvement.
    """
    normaliser: PerplexityNormaliser = "relative"
    """Function that makes the bonus from D, the entropy without minus the entropy with experience.

    relative = w * D / (entropy without experience), clipped; tanh = w * tanh(D); sigmoid = w * (2 *
    sigmoid(D / temperature) - 1); asymmetric = w * D, clipped; log = w * sign(D) * log(1 + |D|).
    The paper tried all five and prefers none. relative is the only one that does not depend on how
    predictable the observations of a task are.
    """
    clip_low: Annotated[float, Field(gt=0)] = 1.0
    """Largest penalty: the bonus of relative and asymmetric is at least -clip_low.

    The paper names no value. Default: 1, the size of r; 0.2 with normaliser = "asymmetric", which
    must not penalise heavily.
    """
    clip_high: Annotated[float, Field(gt=0)] = 1.0
    """Largest bonus of relative and asymmetric. The paper names no value; 1 is the size of r."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Temperature of sigmoid, in nats per token. The paper names no value."""

    @model_validator(mode="before")
    @classmethod
    def _set_default_clip(cls, data: Any) -> Any:
        """Set the default penalty of the asymmetric clip."""
        if isinstance(data, Mapping) and data.get("normaliser") == "asymmetric":
            return {"clip_low": ASYMMETRIC_CLIP, **data}
        return data


class ExtractorSection(Section):
    """Extractor: the model that distils episodes into experiences.

    Ignored by methods without experience. If the actor writes the bank, the sampling settings also
    apply to what it writes: temperature, max_response_tokens, concurrency and others.
    """

    model: Annotated[str, Field(min_length=1)] = "tiny-extractor"
    """Name or path of the extractor model.

    It is a bundled model, a directory with a Hugging Face causal language model and its tokenizer,
    or a model name in the Hugging Face cache.
    """
    profile: Profile | None = None
    """Profile of the model. It selects its prompts and the tables [compact] of presets and tasks.

    full = for language models; compact = few tokens, for models that were trained on such texts.
    Default: as the model's crl.json declares, or full without this file. Checkpoints declare it.
    """
    train: bool = True
    """Training of the extractor on the credit that its experiences earn.

    false = a static extractor, which distils but is not trained.
    """
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Softmax temperature of sampling and of the training loss. Must be above 0."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass of the most probable tokens that are sampled from, after top_k.

    The loss uses probabilities that are renormalised over these tokens. 1 = all tokens. With
    engine.kind = "vllm", a lower value requires top_k.
    """
    top_k: Natural = 0
    """Number of most probable tokens that are sampled from.

    The loss uses probabilities that are renormalised over these tokens. 0 = all tokens.
    """
    structured_outputs: bool = False
    """Restriction of sampling to answers that match the JSON schema of the requested operations.

    Every answer must then begin with the operations, so the extractor cannot think in words before
    them. Requires engine.kind = "vllm", a chat template that does not open the thinking, and
    train = false: tokens are sampled from the probabilities of the allowed tokens, renormalised,
    but the trainer would use those of all tokens.
    """
    max_context_tokens: Annotated[int, Field(ge=2)] = 65_536
    """Maximum number of tokens in one request, prompt and answer together.

    The default is at most the number of positions of the model, if it has 16,384 or more.

    For language models, the middle of a longer transcript is left out.
    """
    max_response_tokens: Count = 4096
    """Maximum number of sampled tokens in one answer, including thinking and the stop token."""
    concurrency: Count = 128
    """Maximum number of requests for distillations and merges in progress at the same time.

    Ignored by a deterministic run, which distils all episodes of a step at once.
    """
    answer_timeout: Annotated[float, Field(gt=0)] = 3600.0
    """Timeout of one answer of the extractor, in seconds.

    A distillation is retried after a timeout and is given up after five failed attempts. A
    deterministic run has no timeout.
    """
    batch: Count = 64
    """Number of credit units in one training step of the extractor.

    A unit is an operation of an answer whose experience has credit that was not trained on yet.
    """
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Lower clip width of the importance ratio in CISPO (eq. 3).

    The lower bound is 1 - clip_low.
    """
    clip_high: Annotated[float, Field(gt=0)] = 0.1
    """Upper clip width of the importance ratio in CISPO (eq. 3).

    The upper bound is 1 + clip_high.
    """
    cooldown: Natural = 2
    """Minimum number of actor steps between two trainings on the same generation (δ in eq. 7)."""
    alpha: NonNegative = 0.5
    """Exponent alpha of the weight (1 + n)^-alpha of a generation (eq. 7).

    n is the number of times that the generation was trained on. 0 = the weight is always 1.
    """
    malformed_reward: Annotated[float, Field(ge=-1, le=1)] | None = None
    """Reward of an answer that contains no operation. Unset = these answers are not trained on."""
    baseline: RewardBaseline = "batch"
    """Baseline that is subtracted from the reward of an experience.

    batch = the mean reward of the training batch (eq. 3), weighted by the weights of eq. 7 (the
    weights are ours); group = the mean reward of the free members of the group that the experience
    guided; guided = the mean reward of all members of this group with an experience. With "group",
    an experience is not trained on if the episodes of all free members end with an error. "guided"
    needs retrieval.per = "rollout". "group" is the relative reward of CRL B.2. With "group" or
    "guided", the batch mean is subtracted as well if critic.enabled or perplexity.weight is set.
    """
    perplexity: PerplexitySection = PerplexitySection()
    """Perplexity-reduction reward of an experience, in addition to the reward of its episodes."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence from the model at the start of the run, per token and in nats.

    0 = off, as in the paper.
    """
    merge_every: Natural = 5
    """Number of actor steps between two merge passes.

    In a merge pass, the extractor merges and discards experiences of the bank. 0 = never.
    """
    merge_tokens: Count = 4096
    """Maximum number of tokens of experiences in one request of a merge pass."""
    lora: LoraSection = LoraSection()
    """Adapter of the extractor."""
    optimizer: OptimizerSection = OptimizerSection()
    """Optimizer of the extractor."""


class BankSection(Section):
    """Experience bank. Ignored by methods without experience."""

    scope: Scope = "task"
    """Range of episodes that an experience may guide.

    goal = episodes of its own task with the same goal; variation = of these, the episodes of the
    same variation, where several games have one goal; task = episodes of its own task; shared =
    episodes of any task. A shared bank is merged as a whole.
    """
    frozen: bool = False
    """Use of bank.init as a read-only bank.

    Nothing is distilled and the extractor is not trained. Retrieval counts and credit are still
    recorded.
    """
    init: BankFile = ""
    """Path of another run's bank.sqlite.

    The run starts from a copy of it. Empty = start with an empty bank.
    """
    max_per_goal: Count | None = None
    """Maximum number of active experiences per goal. Unset = no limit.

    With scope = "variation", it is the maximum number per variation.
    """
    max_entries: Count | None = None
    """Maximum number of active experiences in the whole bank.

    When it is exceeded, 1 % of the limit is evicted in addition to the surplus. Unset = no limit.
    """
    evict: EvictionOrder = "fifo"
    """Eviction order when max_per_goal or max_entries is exceeded.

    fifo = the oldest first. lru = the least recently retrieved first, counted in actor steps.
    credit = the half with the best records stays, ranked as by retrieval.choice = "credit". In the
    other half, experiences with credit are evicted first, from the worst to the best. Then those
    without credit are evicted, from the oldest to the newest. Evicted experiences remain in the
    history.
    """
    evict_votes: Count | None = None
    """Number of net down votes (down minus up) of the extractor at which an experience is evicted.

    Unset = the extractor is not asked for votes.
    """
    duplicate_similarity: Annotated[float, Field(gt=0, le=1)] | None = None
    """Cosine similarity of the texts at or above which a new experience is dropped as a duplicate.

    It is compared with the active experiences that the same queries can retrieve. Unset = nothing
    is dropped.
    """
    queue_size: Count = 1024
    """Maximum number of episodes that wait for distillation or are being distilled.

    A step waits while the queue is full. A deterministic run has no limit.
    """
    key_text_weight: Annotated[float, Field(gt=0)] | None = None
    """Weight of an experience's text in its retrieval key.

    The key is embed(goal) + weight · embed(text), normalised to length 1. Unset = the key is the
    embedding of the text alone.
    """


class RetrievalSection(Section):
    """Retrieval: the choice of an experience for an episode.

    Ignored by methods without experience.
    """

    choice: Reference = "diverse"
    """Policy that chooses among candidates of about equal similarity.

    diverse = eq. 6 of the paper; credit = the best record, (won + 0.3) / (episodes + 1); reward =
    the highest reward of the episode that the experience was written about; or the reference of
    your own policy, path/to/file.py:POLICY or package.module:POLICY.
    """
    per: Literal["group", "rollout"] = "group"
    """Sharing of experiences within a group.

    group = the guided members of a group share one experience; rollout = each guided member
    searches for its own.
    """
    trial_share: Share = 0.0
    """Share of searches that try the least retrieved candidate instead of the policy's choice.

    Both are chosen among candidates of about equal similarity. choice = "diverse" and "reward" have
    no trials.
    Only searches at the start of training episodes count.
    """
    candidates: Count = 16
    """Maximum number of nearest experiences that are considered in one search."""
    margin: Annotated[float, Field(ge=0, le=2)] = 0.05
    """Maximum difference in cosine similarity to the best candidate.

    Candidates within it count as about equally similar. The default fits hash and wordllama.
    Similarities of a learned encoder are closer together.
    """
    min_similarity: Annotated[float, Field(ge=-1, le=1)] = 0.1
    """Minimum cosine similarity of an experience that is returned.

    If no experience reaches it, nothing is returned. The default fits hash and wordllama. A learned
    encoder gives higher similarities to unrelated texts.
    """
    count_penalty: NonNegative = 0.4
    """Rank positions that an experience loses per unit of log(1 + retrieval count) (λ in eq. 6)."""
    recent_steps: Natural = 1
    """Number of actor steps for which a returned experience counts as recent (eq. 6)."""
    batch: Count = 16
    """Maximum number of searches that are answered in one batch."""
    max_wait: NonNegative = 0.001
    """Maximum time that a search waits for its batch to fill, in seconds."""
    workers: Count = 4
    """Number of threads that search a large bank."""


class AskSection(Section):
    """Tool search_and_ask: guided agents may ask the bank, and the extractor answers.

    Questions are asked during an episode. Ignored by methods without experience.
    """

    enabled: bool = False
    """Availability of the tool to guided episodes, also in evaluations with a bank."""
    limit: Count = 3
    """Maximum number of questions in one episode."""
    timeout: Annotated[float, Field(gt=0)] = 30.0
    """Timeout of the extractor's answer to an agent, in seconds.

    After it, the agent receives the retrieved experience unchanged. A deterministic run has no
    timeout.
    """

    @property
    def questions(self) -> int:
        """Maximum number of questions in a guided episode. 0 if the tool is off."""
        return self.limit if self.enabled else 0


def _is_url(name: str) -> bool:
    """Return whether the name is the URL of an endpoint."""
    return name.startswith(("http://", "https://"))


WORD_EMBEDDERS = ("hash", "wordllama")
"""Embedders that need neither a model directory nor an endpoint."""

DEFAULT_EMBEDDERS: Mapping[Profile, str] = {"full": "wordllama", "compact": "hash"}
"""Embedder that embedder.model = "auto" stands for, by the profile of the actor."""


def _embedder_name(name: str) -> str:
    """Return the name of an embedder, with the path of an existing directory made absolute."""
    if name in ("auto", *WORD_EMBEDDERS) or name in PUBLISHED_SHAPES or _is_url(name):
        return name
    path = _absolute_path(name)
    return path if os.path.isdir(path) else name


class EmbedderSection(Section):
    """Embedder: the model that computes the vectors of experiences and queries.

    Ignored by methods without experience.

    A bank that was written with another embedder is embedded again. All texts are embedded in the
    same way: the default prompt of the model, if it has one, precedes each text. A prompt that is
    only meant for queries is not used.
    """

    model: Annotated[str, Field(min_length=1), AfterValidator(_embedder_name)] = "auto"
    """Embedder of experiences and queries.

    hash = hashed character n-grams, which compare wording only. wordllama = means of word vectors,
    which compare the meaning of words; it needs the extra wordllama. auto = hash for an actor with
    the compact profile, else wordllama; config.json of a run names the chosen embedder. Any other
    value names an encoder: a directory with a sentence-transformers or Hugging Face encoder, or its
    name in the Hugging Face cache. The URL of an OpenAI-compatible endpoint is given without
    /embeddings (http://localhost:8000/v1).
    """
    kind: Literal["local", "vllm"] = "local"
    """Runtime of an encoder. local = this process; vllm = a vLLM pooling engine."""
    name: str = ""
    """Name of the model at the endpoint. Required if embedder.model is a URL."""
    key_env: str = ""
    """Name of the environment variable that contains the API key of the endpoint.

    Empty = no key.
    """
    device: Device = "auto"
    """Device of an encoder. auto = cuda if available, else cpu."""
    threads: Count = 1
    """Number of CPU threads of an encoder."""
    batch: Count = 32
    """Maximum number of texts in one forward pass, or in one request to an endpoint."""

    @property
    def is_url(self) -> bool:
        """True if the embedder is an endpoint."""
        return _is_url(self.model)

    @property
    def is_encoder(self) -> bool:
        """True if the embedder is an encoder on this machine."""
        return self.model not in ("auto", *WORD_EMBEDDERS) and not self.is_url


class CriticSection(Section):
    """Actor-critic (CRL appendix B.1): before a guided episode, the actor accepts, refines or
    rejects the retrieved experience.
    """

    enabled: bool = False
    """Use of the actor as critic.

    Off by default, as in the paper's main runs: the actor gives one more answer for every
    experience that a group receives.
    """
    warmup: Natural = 1
    """Number of batches that are played before the first step, without experience and without
    training.

    They give the first estimate of the actor's success rates. The paper states no number.
    """
    min_episodes: Annotated[int, Field(ge=1, le=RATE_WINDOW)] = 8
    """Minimum number of free episodes of a goal for the use of its own success rate.

    With fewer episodes, the success rate of the task is used. Rates are taken over the last 64 free
    episodes.
    """
    max_response_tokens: Count | None = None
    """Maximum number of sampled tokens in one critique, including thinking and the stop token.

    Unset = max_response_tokens of the task.
    """


class EngineSection(Section):
    """Inference engines of actor and extractor."""

    kind: Literal["torch", "vllm"] = "torch"
    """Inference engine.

    torch = continuous batching in this process; vllm = vLLM engines in their own processes, on
    GPUs, or with vLLM's build for CPUs.
    """
    device: Device = "auto"
    """Device of the torch engine. auto = cuda if available, else cpu."""
    threads: Count = 1
    """Number of CPU threads of the engine.

    A second thread makes the small matrices of a tiny model slower.
    """
    max_batch: Count = 256
    """Maximum number of requests that one engine decodes at the same time.

    With vLLM, the limit applies to each replica.
    """
    tensor_parallel: Count = 1
    """Number of GPUs that the weights of one vLLM engine are split across."""
    replicas: Count = 1
    """Number of vLLM engines per model."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of a GPU's memory that one vLLM engine uses, including its weights.

    Unset = the share that the GPU plan leaves for it.
    """
    load_format: Literal["auto", "dummy"] = "auto"
    """Initial weights of a vLLM engine.

    auto = the weights of the model; dummy = random weights of the same shapes, for benchmarks
    without a checkpoint. dummy is refused if an adapter is trained.
    """
    transfer: Literal["file", "nccl"] = "file"
    """Transfer of weights from the learner to the vLLM engines.

    file = through shared memory; nccl = from GPU to GPU. With nccl, engine and learner must use
    different GPUs. nccl is refused if an adapter is trained.
    """


class LearnerSection(Section):
    """Learners of actor and extractor."""

    kind: Literal["local", "deepspeed"] = "local"
    """Training engine.

    local = a worker thread of this process; deepspeed = one process per rank, with ZeRO.
    """
    device: Device = "auto"
    """Device of the learner. auto = cuda if available, else cpu."""
    threads: Count = 1
    """Number of CPU threads of the learner; with deepspeed, of each rank."""
    micro_batch_tokens: Count = 8192
    """Maximum number of tokens in one forward and backward pass.

    A longer sequence is processed alone. Gradients do not depend on this value.
    """
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the weights in forward and backward passes and in the engines.

    Log-probs, the loss and the weights of the optimizer are always float32. auto = bfloat16 on cuda
    if the checkpoint is in half precision, else float32.
    """
    activation_checkpointing: bool = False
    """Recomputation of activations in the backward pass.

    true = about a third more compute and much less memory; false = activations are stored.
    """
    ranks: Count = 1
    """Number of deepspeed processes that train one model.

    On a machine with GPUs, each rank uses a different GPU.
    """
    zero: Annotated[int, Field(ge=0, le=3)] = 2
    """ZeRO stage of deepspeed: the parts of the training state that are partitioned across ranks.

    0 = none; 1 = optimizer state; 2 = optimizer state and gradients; 3 = optimizer state, gradients
    and weights.
    """
    offload: bool = False
    """Offloading of deepspeed's optimizer state and updates to host memory. Requires zero >= 1."""
    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Timeout of deepspeed's ranks without progress, in seconds.

    The run is aborted after it. Progress is a forward or backward pass, an update, or a gathered
    tensor. The longest operation without progress is usually the saving of a model. Starting and
    loading may take 30 minutes.
    """


SETTINGS_OF_KINDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # The installed build determines the device of vLLM.
        "engine.device": ("torch",),
        "engine.tensor_parallel": ("vllm",),
        "engine.replicas": ("vllm",),
        "engine.memory_fraction": ("vllm",),
        "engine.load_format": ("vllm",),
        "engine.transfer": ("vllm",),
        "learner.ranks": ("deepspeed",),
        "learner.zero": ("deepspeed",),
        "learner.offload": ("deepspeed",),
        "learner.timeout": ("deepspeed",),
    }
)
"""Kinds of engines or learners for which a setting has an effect, by key.

Other settings of the two sections have an effect for every kind.
"""


class EvalSection(Section):
    """Sampling in evaluations, and the advice probe."""

    temperature: NonNegative = 1.0
    """Softmax temperature in evaluations. 0 = greedy."""
    probe_every: Natural = 0
    """Number of actor steps between two advice probes. 0 = no probes."""
    concurrency: Count | None = None
    """Maximum number of episodes that an evaluation plays at the same time.

    Unset = as many as training keeps in flight.
    """


class MonitorSection(Section):
    """Destinations of metrics in addition to the run directory, see `crl.monitor.sinks`."""

    tensorboard: bool = False
    """Metrics for TensorBoard. true = they are also written to RUN/tensorboard."""
    wandb: str = ""
    """Name of a Weights & Biases project that metrics are also sent to. Empty = off."""


class PromptsSection(Section):
    """Prompt files that replace the bundled prompts (crl/prompts/*.txt).

    A file must contain the same `{slots}` as the prompt that it replaces.
    """

    actor: PromptFile | None = None
    """File with the instructions for agents that are language models.

    Unset = the bundled prompt.
    """
    actor_tags: PromptFile | None = None
    """File with these instructions for environments whose actions have tags of their own.

    Such an environment is search_qa. Unset = the bundled prompt.
    """
    experience: PromptFile | None = None
    """File with the text that introduces a retrieved experience to these agents.

    Unset = the bundled prompt.
    """
    distil: PromptFile | None = None
    """File with the request to distil an episode, for the extractor. Unset = the bundled prompt."""
    vote: PromptFile | None = None
    """File with the request to vote on experiences, for the extractor.

    It is appended to prompts.distil if bank.evict_votes is set. Unset = the bundled prompt.
    """
    merge: PromptFile | None = None
    """File with the request to merge experiences, for the extractor. Unset = the bundled prompt."""
    reflection: PromptFile | None = None
    """File with the request for a reflection on a failed attempt (`reflexion`).

    Unset = the bundled prompt.
    """
    tip: PromptFile | None = None
    """File with the request for a tip after an episode (`empo2`). Unset = the bundled prompt."""
    failure: PromptFile | None = None
    """File with the request to analyse a failed episode (`role_agent`).

    Unset = the bundled prompt.
    """
    retrieve: PromptFile | None = None
    """File with the request to choose tasks with similar failures (`role_agent`).

    Unset = the bundled prompt.
    """
    predict: PromptFile | None = None
    """File with the request to predict the next states, for agents of `role_agent`.

    Unset = the bundled prompt.
    """
    ask: PromptFile | None = None
    """File with the description of the tool search_and_ask, for agents that are language models.

    Unset = the bundled prompt.
    """
    refine: PromptFile | None = None
    """File with the request to answer a question of an agent, for the extractor.

    Unset = the bundled prompt.
    """
    critic: PromptFile | None = None
    """File with the request to judge an experience, for agents that are language models.

    It is used if critic.enabled is true. Unset = the bundled prompt.
    """

    @property
    def files(self) -> dict[str, Path]:
        """Paths of the files that were given, by the name of the prompt."""
        return {name: Path(path) for name, path in self if path is not None}


def _context(value: str) -> str:
    """Return a valid `context`. Raise `ValueError` for any other text."""
    if value != "full" and not _WINDOW.fullmatch(value):
        raise ValueError('should be "full" or "window(n)" with n at least 1')
    return value


class StreamSection(Section):
    """Training episodes of a task.

    They are played in named places, which persist over several visits and are then replaced.
    Ignored by environments without persistent places.
    """

    places: Count = StreamSettings.places
    """Number of places that are open at the same time."""
    permanent: Natural = StreamSettings.permanent
    """Number of these places that stay for the whole run.

    The eval set of the seen split uses them.
    """
    visits: Count = StreamSettings.visits
    """Number of groups that are played in a place before a new place replaces it."""


class EvalSets(Section):
    """Sizes of the fixed eval sets. 0 = the set is not played."""

    seen: Natural = 256
    """Number of episodes of the seen split.

    They are played under held-out dynamics, in places of the training stream that stay for the
    whole run; or they are the games that the environment reserves for it (docs/tasks.md).
    """
    unseen: Natural = 256
    """Number of episodes of the unseen split: places or games that are never trained on."""
    online_places: Natural = 0
    """Number of places of the online evaluation.

    They belong to the unseen split. A place has five visits of four guided episodes each, and a
    temporary bank learns from all visits but the last. The last three visits count, and are also
    played without experience.
    """
    probe_places: Natural = 0
    """Number of places of the advice probe.

    Each place is played three times: without advice, with right advice and with wrong advice.
    """


QUESTION_SETS = (
    "nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle",
)  # fmt: skip
"""Sets of questions of search_qa's official data, by the names of their folders."""


def _question_set(name: str) -> str:
    """Return the name of a set. Raise `ValueError` for any other text."""
    if name not in QUESTION_SETS:
        raise ValueError(f"should be one of {', '.join(QUESTION_SETS)}")
    return name


QuestionSet = Annotated[str, AfterValidator(_question_set)]


class SearchSection(Section):
    """Search tool and questions of the environments search_qa and search_qa_small.

    Other environments have no search tool, and refuse other values than the defaults.
    """

    retriever: Literal["bm25", "dense", "http"] = "bm25"
    """Search for documents.

    bm25 = BM25 over stemmed words; dense = embeddings, compared with every document; http = an
    endpoint of the form of Search-R1's retrieval server. bm25 and dense read the whole corpus into
    memory.
    """
    top_k: Count = 3
    """Number of documents that a search returns."""
    url: str = ""
    """Address of the endpoint, such as http://localhost:8000/retrieve. Required for http."""
    timeout: Annotated[float, Field(gt=0)] = 10.0
    """Timeout of one request to the endpoint, in seconds.

    A search makes up to three requests. Together they should take less than rollout.env_timeout.
    """
    embedder: EmbedderSection = EmbedderSection(model="wordllama")
    """Embedder of documents and queries, for dense. The kind vllm and auto are not possible."""
    query_prefix: str = ""
    """Text before a query that is embedded. E5 needs "query: "."""
    document_prefix: str = ""
    """Text before a document that is embedded. E5 needs "passage: "."""
    train_sets: list[QuestionSet] = Field(default=["nq", "hotpotqa"], min_length=1)
    """Sets of the official data whose training questions are used.

    The sets are nq, triviaqa, popqa, hotpotqa, 2wikimultihopqa, musique and bamboogle.
    """
    test_sets: list[QuestionSet] = Field(default=[])
    """Sets of the official data whose test questions are the unseen split. Empty = all sets."""

    @model_validator(mode="after")
    def _check(self) -> SearchSection:
        for name in ("train_sets", "test_sets"):
            sets = getattr(self, name)
            if len(set(sets)) < len(sets):
                raise ValueError(f"{name} must not name a set twice, as in {', '.join(sets)}")
        is_http = self.retriever == "http"
        if is_http and not _is_http_address(self.url):
            raise ValueError(
                f"retriever http needs the address of its endpoint in url, such as "
                f"http://localhost:8000/retrieve, not {self.url!r}"
            )
        if is_http and "@" in urlsplit(self.url).netloc:
            raise ValueError("url must not contain a user or a password, which errors would show")
        if self.url and not is_http:
            raise ValueError(f"url does not apply to the retriever {self.retriever}")
        if self.embedder.kind == "vllm" or self.embedder.model == "auto":
            raise ValueError("embedder must have the kind local, and a model other than auto")
        if self.embedder.is_url and not self.embedder.name:
            raise ValueError("embedder.name is required if embedder.model is a URL")
        return self


def _is_http_address(url: str) -> bool:
    """Return whether a text is a URL of HTTP with a host, a valid port and no white space."""
    try:
        parts = urlsplit(url)
        valid_port = parts.port != 0
    except ValueError:
        return False
    printable = url.isascii() and url.isprintable() and " " not in url
    return parts.scheme in ("http", "https") and bool(parts.hostname) and valid_port and printable


class TaskConfig(Section):
    """Settings of one task. They are read from a file in tasks/."""

    name: Name
    """Name of the task in --tasks and in metric names. Default: the name of the file."""
    env: Reference
    """Environment of the task.

    Bundled environment: a name of crl/envs/registry.py. Environment of GEM: gem:ID. Your own
    environment: path/to/file.py:ATTRIBUTE or package.module:ATTRIBUTE.
    """
    rendering: Literal["full", "compact"]
    """Rendering of observations: full = text for language models, compact = few tokens for tiny
    models. Tiny models use the value in the table [compact] of the task's file.
    """
    max_turns: Count
    """Maximum number of actions in an episode.

    An episode that is not over by then counts as truncated.
    """
    extra_turns: Natural = 0
    """Number of extra actions for which an unfinished episode continues.

    The extractor then sees more of the episode. These actions are neither rewarded nor trained on,
    but total/env_turns counts them. Ignored by a run that distils nothing.
    """
    max_response_tokens: Count
    """Maximum number of sampled tokens in one completion, including the stop token."""
    context: Annotated[str, AfterValidator(_context)] = "full"
    """Part of the episode that the actor sees.

    full = the whole episode, which is one training sequence; window(n) = the last n turns, and each
    turn is one training sequence.
    """
    stream: StreamSection = StreamSection()
    """Stream of training episodes."""
    eval: EvalSets = EvalSets()
    """Sizes of the eval sets."""
    search: SearchSection = SearchSection()
    """Search tool and questions."""

    @property
    def window(self) -> int | None:
        """Number n of "window(n)". None for "full"."""
        match = _WINDOW.fullmatch(self.context)
        return int(match.group(1)) if match else None


class RunConfig(Section):
    """Complete configuration of a run.

    The type of a run's configuration is `run_config_type(spec)`: it has one more section, with the
    settings of the run's method.

    Raise `ConfigError` if two sections contradict each other.
    """

    method: Reference = "complementary"
    """Training method: a bundled one, or a user's `MethodSpec` as `package.module:SPEC` or
    `path/to/file.py:SPEC`.
    """
    preset: str = "cpu"
    """Preset that the values start from. It is chosen with --preset."""
    gpus: Count | None = None
    """Number of GPUs of the run. Unset = all visible GPUs."""
    gpu_memory: Annotated[float, Field(gt=0)] | None = None
    """Memory of one GPU in GiB, for a plan on a machine without these GPUs.

    If enough GPUs are visible, their actual memory is used.
    """
    run: RunSection = RunSection()
    """Length, seed and schedule of the run."""
    rollout: RolloutSection = RolloutSection()
    """Collection of training episodes."""
    actor: ActorSection = ActorSection()
    """Model that plays, and its training."""
    extractor: ExtractorSection = ExtractorSection()
    """Model that distils, and its training."""
    bank: BankSection = BankSection()
    """Storage of experiences."""
    retrieval: RetrievalSection = RetrievalSection()
    """Choice of the experience for an episode."""
    ask: AskSection = AskSection()
    """Questions of agents to the bank during an episode."""
    embedder: EmbedderSection = EmbedderSection()
    """Embedding of experiences and queries."""
    critic: CriticSection = CriticSection()
    """Judgement of experiences by the actor."""
    engine: EngineSection = EngineSection()
    """Inference of both models."""
    learner: LearnerSection = LearnerSection()
    """Training of both models."""
    eval: EvalSection = EvalSection()
    """Sampling in evaluations, and the advice probe."""
    monitor: MonitorSection = MonitorSection()
    """Destinations of metrics in addition to the run directory."""
    prompts: PromptsSection = PromptsSection()
    """Prompts for language models."""
    tasks: dict[Name, TaskConfig] = Field(min_length=1)
    """Tasks of the run, by name. They are chosen with --tasks."""

    @property
    def spec(self) -> MethodSpec:
        """Description of the method."""
        return method_spec(self.method)

    @property
    def method_settings(self) -> Any:
        """Section of the method; None if the method has no settings."""
        return getattr(self, self.spec.name, None)

    @property
    def guided_members(self) -> int:
        """Number of members of a group that are guided."""
        guidance, settings = self.spec.guidance, self.method_settings
        return guidance.members(settings, self.rollout.group_size) if guidance else 0

    @property
    def all_guided(self) -> bool:
        """True if every member of a group is guided."""
        return self.guided_members == self.rollout.group_size

    @property
    def uses(self) -> frozenset[Part]:
        """Parts of a run that the method uses with its settings."""
        return self.spec.parts(self.method_settings)

    @property
    def with_bank(self) -> bool:
        """True if the method has an experience bank."""
        return "bank" in self.uses

    @property
    def guides(self) -> bool:
        """True if experiences of a bank can guide episodes."""
        return self.with_bank and self.spec.guidance is not None

    def profile(self, role: RoleName) -> Profile:
        """Return the profile of a model: its setting, or else what the model declares.

        Raise `ConfigError` if its crl.json is invalid.
        """
        section = self.actor if role == "actor" else self.extractor
        return section.profile or profile_of(section.model, f"{role}.model")

    @property
    def with_extractor(self) -> bool:
        """True if the method has an extractor."""
        return "extractor" in self.uses

    @property
    def writer(self) -> RoleName:
        """Model that writes the bank: the extractor, or without one the actor."""
        return "extractor" if self.with_extractor else "actor"

    @property
    def distils(self) -> bool:
        """True if finished episodes are distilled into the bank."""
        return self.with_bank and not self.bank.frozen

    @property
    def plays_overtime(self) -> bool:
        """True if episodes are played past their turn limit, for the extractor to read.

        Notes are part of an algorithm with fixed turns, so their writer does not see more.
        """
        return self.distils and not self.spec.notes

    @property
    def trains_extractor(self) -> bool:
        """True if the extractor is trained."""
        trainable = self.with_extractor and not self.spec.notes
        return self.distils and trainable and self.extractor.train

    def updates(self, role: str) -> bool:
        """Return whether training changes the weights of a role: not with a learning rate of 0."""
        section = self.actor if role == "actor" else self.extractor
        return self.trains(role) and section.optimizer.learning_rate > 0

    @property
    def compares_lessons(self) -> bool:
        """True if the lessons of the extractor are compared with those of the untrained one."""
        return self.distils and self.with_extractor and not self.spec.notes

    def trains(self, role: str) -> bool:
        """Return whether the run trains a role: the actor or the extractor."""
        return self.actor.train if role == "actor" else self.trains_extractor

    def trained_adapter(self, role: str) -> LoraSection | None:
        """Return the adapter that the run trains for a role, the actor or the extractor.

        Return None if all weights of the role are trained, or none.
        """
        if not self.trains(role):
            return None
        section = (self.actor if role == "actor" else self.extractor).lora
        return section if section.rank else None

    @model_validator(mode="after")
    def _check_sections(self) -> RunConfig:
        _check_run(self)
        _check_learner(self.learner)
        _check_engine(self)
        _check_adapters(self)
        _check_optimizers(self)
        _check_actor(self.actor)
        self.spec.check(self, self.method_settings)
        if not self.actor.train and not (self.distils and self.guides):
            cause = (
                f"{self.method} has no bank" if not self.with_bank
                else "bank.frozen is true" if self.guides
                else f"{self.method} shows its notes to no agent"
            )  # fmt: skip
            raise ConfigError(
                "actor.train", False, f"leaves nothing to learn: {cause}", "Leave it out"
            )
        _check_perplexity(self)
        if self.with_bank:
            _check_writer(self)
            _check_structured_outputs(self)
            _check_bank(self)
            _check_embedder(self)
        _check_critic(self)
        for name, task in self.tasks.items():
            _check_task(f"tasks.{name}", name, task)
            if task.max_response_tokens >= self.actor.max_context_tokens:
                reason = (
                    "leaves no tokens for the prompt: actor.max_context_tokens is "
                    f"{self.actor.max_context_tokens}"
                )
                remedy = "Lower it, or raise actor.max_context_tokens"
                if task.rendering == "full":
                    remedy += ". Write settings for tiny models in [compact] of the task's file"
                raise ConfigError(
                    f"tasks.{name}.max_response_tokens", task.max_response_tokens, reason, remedy
                )
        return self


@cache
def run_config_type(*specs: MethodSpec) -> type[RunConfig]:
    """Return the type of the configuration of runs with the method of `specs`.

    The type has a section for each spec with settings. With several specs it only describes
    settings.

    Raise `ConfigError` if the name of a method is the name of another section.
    """
    sections: dict[str, Any] = {}
    for spec in specs:
        if hasattr(RunConfig, spec.name) or spec.name in RunConfig.model_fields:
            reason = f"its name {spec.name!r} is the name of a part of the configuration"
            raise ConfigError("method", spec.name, reason, "Rename the method")
        if spec.settings:
            description = f"Settings of the method {spec.name}."
            default = Field(default=spec.settings(), description=description)
            sections[spec.name] = (spec.settings, default)
    return create_model("RunConfig", __base__=RunConfig, **sections)


def _check_run(config: RunConfig) -> None:
    """Raise `ConfigError` for a contradiction between `run` and `rollout`."""
    if config.run.deterministic and config.rollout.max_staleness:
        raise ConfigError(
            "run.deterministic",
            True,
            f"requires rollout.max_staleness = 0, but it is {config.rollout.max_staleness}: when "
            "rollouts run ahead of training, their policy version depends on timing",
            "Add --set rollout.max_staleness=0",
        )


def _check_learner(learner: LearnerSection) -> None:
    """Raise `ConfigError` for offloading without ZeRO."""
    if learner.kind == "deepspeed" and learner.offload and not learner.zero:
        reason = "requires ZeRO, but learner.zero is 0"
        raise ConfigError("learner.offload", True, reason, "Choose learner.zero = 1, 2 or 3")


def _check_adapters(config: RunConfig) -> None:
    """Raise `ConfigError` for settings of a vLLM engine that an adapter contradicts."""
    engine = config.engine
    trained = [role for role in ("actor", "extractor") if config.trained_adapter(role)]
    if not trained or engine.kind != "vllm":
        return
    if engine.load_format == "dummy":
        reason = (
            f"starts with random weights, but {trained[0]}.lora.rank trains an adapter and the "
            "engine receives no other weights"
        )
        raise ConfigError("engine.load_format", "dummy", reason, "Use engine.load_format=auto")
    if engine.transfer == "nccl":
        reason = f"sends whole weights, but {trained[0]}.lora.rank trains an adapter"
        raise ConfigError("engine.transfer", "nccl", reason, "Use engine.transfer=file")


def _check_engine(config: RunConfig) -> None:
    """Raise `ConfigError` for an engine that contradicts other settings.

    They are `run.deterministic`, the learner and truncated sampling.
    """
    engine = config.engine
    if engine.kind == "vllm" and config.run.deterministic:
        reason = (
            "is not possible with engine.kind = vllm: there, the requests in a batch depend on "
            "timing, and the last bits of a result depend on the batch"
        )
        raise ConfigError(
            "run.deterministic", True, reason, "Leave it out, or use --set engine.kind=torch"
        )
    if engine.kind == "vllm" and engine.transfer == "nccl" and config.learner.kind == "local":
        reason = "requires a learner in separate processes, but learner.kind is local"
        raise ConfigError(
            "engine.transfer",
            "nccl",
            reason,
            "Use --set learner.kind=deepspeed, or --set engine.transfer=file",
        )
    roles = ("actor", *(("extractor",) if config.with_extractor else ()))
    for name, role in ((name, getattr(config, name)) for name in roles):
        if engine.kind == "vllm" and role.top_p < 1 and not role.top_k:
            reason = (
                f"requires {name}.top_k with engine.kind = vllm, which returns the tokens that it "
                "kept only up to a fixed number"
            )
            remedy = f"Add --set {name}.top_k=50, or use --set engine.kind=torch"
            raise ConfigError(f"{name}.top_p", role.top_p, reason, remedy)


def _check_actor(actor: ActorSection) -> None:
    """Raise `ConfigError` if clip or importance cap do not fit the importance ratio."""
    if actor.ratio == "sequence":
        for key in ("clip_low", "clip_high"):
            if getattr(actor, key) > SEQUENCE_CLIP_LIMIT:
                raise ConfigError(
                    f"actor.{key}",
                    getattr(actor, key),
                    'is too wide for actor.ratio = "sequence": a length-normalised sequence '
                    "ratio stays so close to 1 that nothing would be clipped",
                    f"Add --set actor.{key}={SEQUENCE_CLIP:g}, or use --set actor.ratio=token",
                )
    if actor.importance_cap is not None and actor.old_logp != "recompute":
        raise ConfigError(
            "actor.importance_cap",
            actor.importance_cap,
            'requires actor.old_logp = "recompute", but it is '
            f'"{actor.old_logp}": ratios against the log-probs of the engine already '
            "correct the mismatch, which would be corrected twice",
            "Remove it, or add --set actor.old_logp=recompute",
        )


def _check_writer(config: RunConfig) -> None:
    """Raise `ConfigError` for token limits or a baseline that the bank's writer cannot have."""
    extractor, writer = config.extractor, config.writer
    context = getattr(config, writer).max_context_tokens
    if extractor.max_response_tokens >= context:
        reason = f"leaves no tokens for the prompt: {writer}.max_context_tokens is {context}"
        raise ConfigError(
            "extractor.max_response_tokens",
            extractor.max_response_tokens,
            reason,
            f"Lower it, or raise {writer}.max_context_tokens",
        )
    if config.trains_extractor and extractor.baseline == "group" and config.all_guided:
        reason = "is computed from the free members of a group, but all members are guided"
        raise ConfigError(
            "extractor.baseline", "group", reason, "Add --set extractor.baseline=batch"
        )
    if (
        config.trains_extractor
        and extractor.baseline == "guided"
        and config.retrieval.per == "group"
    ):
        reason = (
            "compares the experiences that guided a group, but all its guided members share one "
            "(retrieval.per = group)"
        )
        raise ConfigError("extractor.baseline", "guided", reason, "Add --set retrieval.per=rollout")
    prompt_budget = context - extractor.max_response_tokens
    if extractor.merge_every and extractor.merge_tokens >= prompt_budget:
        reason = (
            f"leaves no tokens for the rest of the prompt: the {writer}'s context has "
            f"{prompt_budget} tokens besides its answer"
        )
        raise ConfigError(
            "extractor.merge_tokens",
            extractor.merge_tokens,
            reason,
            f"Lower it, or raise {writer}.max_context_tokens",
        )


def _check_optimizers(config: RunConfig) -> None:
    """Raise `ConfigError` for a learning rate that decays before the end of its warm-up."""
    for role in ("actor", "extractor"):
        optimizer = getattr(config, role).optimizer
        if 0 < optimizer.decay_steps <= optimizer.warmup_steps:
            raise ConfigError(
                f"{role}.optimizer.decay_steps",
                optimizer.decay_steps,
                f"is not above {role}.optimizer.warmup_steps = {optimizer.warmup_steps}",
                "Choose a larger number of updates, or 0 for no decay",
            )


def _check_perplexity(config: RunConfig) -> None:
    """Raise `ConfigError` for a perplexity reward that trains nothing, or for an asymmetric clip
    whose penalty is as large as its bonus.
    """
    perplexity = config.extractor.perplexity
    if not perplexity.weight:
        return
    if not config.trains_extractor:
        if not config.with_extractor:
            cause = f"the method {config.spec.name} has no extractor"
        else:
            cause = "bank.frozen is true" if config.bank.frozen else "extractor.train is false"
            cause = f"{config.method} trains no extractor" if config.spec.notes else cause
        raise ConfigError(
            "extractor.perplexity.weight",
            perplexity.weight,
            f"rewards the extractor, but it is not trained: {cause}",
            "Leave it out, or train the extractor",
        )
    if perplexity.normaliser == "asymmetric" and perplexity.clip_low >= perplexity.clip_high:
        raise ConfigError(
            "extractor.perplexity.clip_low",
            perplexity.clip_low,
            'is not below extractor.perplexity.clip_high, but normaliser = "asymmetric" limits a '
            "penalty more than a bonus",
            f"Choose a value below {perplexity.clip_high:g}, or normaliser=relative",
        )


def _check_structured_outputs(config: RunConfig) -> None:
    """Raise `ConfigError` if training or the engine does not allow structured outputs."""
    key = "extractor.structured_outputs"
    if not config.extractor.structured_outputs:
        return
    if not config.with_extractor or config.spec.notes:
        reason = f"has no effect: {config.method} has no extractor that answers with operations"
        raise ConfigError(key, True, reason, "Leave it out")
    if config.trains_extractor:
        reason = (
            "is not possible while the extractor is trained: the JSON schema excludes tokens, and "
            "the others are sampled from their renormalised probabilities, but the trainer "
            "computes the probabilities among all tokens"
        )
        raise ConfigError(key, True, reason, "Add --set extractor.train=false, or leave it out")
    if config.engine.kind != "vllm":
        reason = f"requires vLLM, but engine.kind is {config.engine.kind}"
        raise ConfigError(key, True, reason, "Add --set engine.kind=vllm, or leave it out")


def _check_bank(config: RunConfig) -> None:
    """Raise `ConfigError` if settings of the bank and of retrieval contradict each other."""
    bank, retrieval = config.bank, config.retrieval
    if retrieval.choice not in BUNDLED_POLICIES:
        # Bundled policies are valid. Loading one would import crl.manager in every command.
        retrieval_policy(retrieval.choice)
    lowest_similarity = math.sqrt(max(0.0, 1 - (bank.key_text_weight or 0) ** 2))
    if bank.key_text_weight is not None and retrieval.min_similarity > lowest_similarity:
        reason = (
            "may exclude experiences of the searched goal: with "
            f"bank.key_text_weight = {bank.key_text_weight}, their similarity can be as low as "
            f"{lowest_similarity:.4f}"
        )
        raise ConfigError(
            "retrieval.min_similarity",
            retrieval.min_similarity,
            reason,
            f"Choose at most {lowest_similarity:.4f}",
        )
    if bank.evict != "fifo" and bank.max_per_goal is None and bank.max_entries is None:
        raise ConfigError(
            "bank.evict",
            bank.evict,
            "a bank without bank.max_per_goal and bank.max_entries evicts nothing",
            "Also set bank.max_per_goal or bank.max_entries",
        )
    if bank.frozen and not bank.init:
        raise ConfigError(
            "bank.frozen",
            True,
            "the bank would stay empty, because bank.init is not set and nothing is written to a "
            "frozen bank",
            "Also set bank.init",
        )


def _check_critic(config: RunConfig) -> None:
    """Raise `ConfigError` if method, warm-up or context do not allow the critic."""
    critic, context = config.critic, config.actor.max_context_tokens
    if critic.enabled and not config.with_bank:
        reason = f"the method {config.spec.name} has no experience for the actor to judge"
        raise ConfigError(
            "critic.enabled", True, reason, "Leave it out, or choose a method with a bank"
        )
    if critic.enabled and not critic.warmup and config.all_guided:
        reason = (
            "gives no estimate of the actor's success rate, because all later episodes are guided"
        )
        raise ConfigError("critic.warmup", critic.warmup, reason, "Choose at least 1")
    if critic.max_response_tokens is not None and critic.max_response_tokens >= context:
        reason = f"leaves no tokens for the prompt: actor.max_context_tokens is {context}"
        raise ConfigError(
            "critic.max_response_tokens",
            critic.max_response_tokens,
            reason,
            "Lower it, or raise actor.max_context_tokens",
        )


def _check_embedder(config: RunConfig) -> None:
    """Raise `ConfigError` for a contradiction between the settings of the embedder."""
    embedder = config.embedder
    if embedder.is_url and not embedder.name:
        raise ConfigError(
            "embedder.name",
            "",
            "is required because embedder.model is the URL of an endpoint",
            "Set it to the name of the model at the endpoint",
        )
    if embedder.is_url and config.run.deterministic:
        reason = (
            "cannot be an endpoint with run.deterministic: its vectors may depend on the other "
            "requests that it serves"
        )
        raise ConfigError(
            "embedder.model",
            embedder.model,
            reason,
            "Use hash, wordllama or the directory of an encoder",
        )
    if embedder.kind == "vllm":
        if not embedder.is_encoder:
            reason = "requires the directory of an encoder as embedder.model"
            raise ConfigError(
                "embedder.kind",
                "vllm",
                reason,
                "Leave it out, or set embedder.model to a directory",
            )
        if config.run.deterministic:
            reason = (
                "is not possible with run.deterministic: vectors depend on the other texts in the "
                "batch"
            )
            raise ConfigError("embedder.kind", "vllm", reason, "Leave it out")
    for key in ("name", "key_env"):
        if (value := getattr(embedder, key)) and not embedder.is_url:
            raise ConfigError(
                f"embedder.{key}",
                value,
                "only applies to an endpoint, but embedder.model is not a URL",
                "Leave it out",
            )


def _check_task(key: str, name: str, task: TaskConfig) -> None:
    """Raise `ConfigError` for a contradiction within the settings of one task."""
    if task.name != name:
        raise ConfigError(
            f"{key}.name",
            task.name,
            f"differs from the name of the task in the run, {name}",
            "Use the same name in both places",
        )
    if name == OVERALL:
        raise ConfigError(
            f"{key}.name",
            name,
            "is reserved for the aggregate over all tasks",
            "Choose another name",
        )
    stream = task.stream
    if stream.permanent > stream.places:
        reason = f"is more than {key}.stream.places, which is {stream.places}"
        raise ConfigError(
            f"{key}.stream.permanent", stream.permanent, reason, f"Choose at most {stream.places}"
        )
    if task.eval.seen and not stream.permanent:
        reason = f"requires permanent places, but {key}.stream.permanent is 0"
        raise ConfigError(
            f"{key}.eval.seen",
            task.eval.seen,
            reason,
            f"Set it to 0, or raise {key}.stream.permanent",
        )
