"""The recipe, one frozen strict model per section. Units are in the names; the text under a field is its help.

The sections of the cluster are in cluster_sections.py. Values that depend on each other are checked in checks.py;
loading, `base:` files and overrides are in load.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from argusrl.config.base import Count, Natural, NonNegative, Positive, Seconds, Section, Share
from argusrl.config.cluster_sections import ClusterSection


class RunSection(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    """Name of the run folder; default is the recipe's file name."""
    root: Path = Path("runs")
    """Folder that holds run folders: any POSIX folder all nodes see (FSx for Lustre, NFS, local disk)."""
    max_bytes: Count | None = None
    """Bytes that the run folder may hold. A step that would go beyond prunes all but the newest checkpoint and the
    adapters that a restart needs, and trajectories where checkpoint.keep_trajectories is false; null is no limit."""
    copy_to: Annotated[str, Field(pattern=r"^s3://[a-z0-9][a-z0-9.-]{2,62}(/.*)?$")] | None = None
    """Copy every new best adapter and the last one to <copy_to>/<run>/adapters in the background; null copies none."""
    seed: Natural = 0
    """Seeds prompt order, sampling noise and adapter initialisation."""
    deterministic: bool = False
    """Ask torch for deterministic kernels and refuse what has none, so that a run can be repeated bit for bit."""


class ModelSection(Section):
    path: str
    """Model folder, or a hub id (the usual HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE and HF_TOKEN apply)."""
    revision: str | None = None
    """Hub revision."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Computation type of base weights; auto is bfloat16 on GPU and float32 on CPU."""
    max_tokens: Count = 4096
    """Longest sequence (prompt with expanded images and replies of all turns); the engine's max_model_len."""
    min_pixels: Count | None = None
    """Images are scaled up to at least this many pixels; default is the model's own."""
    max_pixels: Count | None = None
    """Images are scaled down to at most this many pixels; default is the model's own."""
    chat_template: Path | None = None
    """Jinja file that replaces the model's chat template."""
    chat_template_options: dict[str, Any] = {}
    """Extra variables for the chat template, e.g. {enable_thinking: false}."""

    def dtype_on(self, device: str) -> Literal["float32", "bfloat16"]:
        """`dtype` with auto resolved for "cpu" or "cuda"."""
        if self.dtype != "auto":
            return self.dtype
        return "bfloat16" if device == "cuda" else "float32"


class AdapterSection(Section):
    kind: Literal["lora", "full"] = "lora"
    """lora trains a LoRA adapter; full trains every parameter of the language model."""
    rank: Count = 32
    """LoRA rank; one that the engine serves: 1, 8, 16, 32, 64, 128, 256, 320 or 512."""
    alpha: Positive | None = None
    """LoRA alpha; default is twice the rank."""
    target: Literal["language"] | list[str] = "language"
    """Modules to adapt: all linear layers of the language model, or names of linear layers in it (q_proj, …)."""
    initial: Path | None = None
    """PEFT folder to start from; default is a fresh adapter that changes nothing."""
    serving: Literal["auto", "lora", "merged"] = "auto"
    """How engines apply the adapter: merged into their weights, which decode as fast as the base model's, or through
    LoRA kernels; auto is lora in bfloat16, which rounds small changes away, and with rollout.staleness, else merged."""

    def merged_in(self, dtype: str) -> bool:
        """Whether engines of this type merge the adapter into their weights: `serving` with auto resolved."""
        wanted = self.serving == "merged" or (self.serving == "auto" and dtype == "float32")
        return wanted and self.kind == "lora"

    def side_by_side(self) -> AdapterSection:
        """The same, served so that the base model and adapters can be asked at any time."""
        return self.model_copy(update={"serving": "lora"}) if self.kind == "lora" else self

    @property
    def scale_alpha(self) -> float:
        """`alpha` with its default."""
        return 2.0 * self.rank if self.alpha is None else self.alpha


class ColumnSection(Section):
    prompt: str = "prompt"
    """Column with the question: text, or a list of chat messages."""
    images: str | None = "images"
    """Column with one image or a list of them: bytes, {bytes, path}, a path, or a data URI."""
    answer: str | None = "answer"
    """Column with the answer."""
    id: str | None = None
    """Column with a unique id; default is the row number."""
    info: list[str] = []
    """More columns that rewards and environments get to see."""


class DataSection(Section):
    kind: Literal["files", "generated", "environment"] = "files"
    """files reads rows; generated calls a function; environment takes its starts from the environment section."""
    train: Path | str | None = None
    """Parquet or JSONL file, a folder of them, or a folder saved by `datasets`."""
    heldout: Path | str | None = None
    """The same for evaluation."""
    format: Literal["columns", "verl", "skyrl", "trl"] = "columns"
    """columns uses the mapping below; the others read files made for those projects."""
    columns: ColumnSection = ColumnSection()
    """Column mapping."""
    system_prompt: str | None = None
    """Put before every prompt."""
    suffix: str | None = None
    """Text added to the end of every question, e.g. how to answer."""
    generator: str | None = None
    """kind generated: `module:function` or `file.py:function`; called as f(index, split, **options) -> Prompt."""
    options: dict[str, Any] = {}
    """Keyword arguments of the generator."""
    train_size: Count | None = None
    """Use this many rows (files) or make this many (generated)."""
    heldout_size: Count | None = None
    """The same for evaluation."""
    shuffle: bool = True
    """Visit rows in a seeded random order, another one every pass."""
    on_bad_row: Literal["error", "skip"] = "error"
    """error lists bad rows and stops before anything starts; skip leaves them out and lists them."""
    max_image_pixels: Count = 50_000_000
    """Refuse images with more pixels than this."""


class EnvironmentSection(Section):
    kind: Literal["single_turn", "gymnasium", "python"] = "single_turn"
    """single_turn asks once; gymnasium plays a Gymnasium environment rendered to pixels; python is your own class."""
    id: str | None = None
    """kind gymnasium: registered id, e.g. FrozenLake-v1."""
    factory: str | None = None
    """kind python: `module:Class` or `file.py:Class`. kind gymnasium: function (info, **options) -> gymnasium.Env."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    actions: dict[str, int] = {}
    """kind gymnasium: words the model may answer, and the action each stands for."""
    action_pattern: str = r"<action>\s*(.*?)\s*</action>"
    """Regular expression whose first group is the action in a reply."""
    instruction: str = ""
    """Text of the first message, next to the first image."""
    turn_text: str = ""
    """Text next to the image of later turns."""
    image_size: Count | None = None
    """Rendered frames are scaled so that the longer side has this many pixels; default is as rendered."""
    max_turns: Count = 1
    """Episodes longer than this are truncated."""
    starts: list[dict[str, Any]] = []
    """kind gymnasium: training starts, each {seed, options}; options go over those above. Default is seeds 0 …."""
    heldout_starts: list[dict[str, Any]] = []
    """The same for evaluation; default is seeds 1,000,000 …."""
    step_timeout_seconds: Seconds = 60.0
    """Deadline of one reset, step or close."""
    episode_timeout_seconds: Seconds = 1800.0
    """Deadline of a whole episode."""
    processes: Count = 1
    """Processes per episode worker that run environments."""


class RewardSection(Section):
    kind: Literal["exact", "choice", "number", "math", "format", "environment", "python", "http"]
    """Which reward; environment takes what the environment paid."""
    name: str | None = None
    """Name in metrics; default is the kind."""
    weight: float = 1.0
    """Factor in the weighted sum."""
    function: str | None = None
    """kind python: `module:function` or `file.py:function`, sync or async."""
    pattern: str | None = None
    """exact, choice, number: regular expression whose first group is the answer in a reply. format: what must match."""
    options: dict[str, Any] = {}
    """Keyword arguments of the reward."""
    url: str | None = None
    """kind http: where batches are posted."""
    token: str | None = None
    """kind http: bearer token as a reference, env:NAME or file:PATH."""
    batch_size: Count = 16
    """kind http: most trajectories in one request."""
    timeout_seconds: Seconds = 30.0
    """Deadline of one call; a Python reward that runs longer is killed."""
    attempts: Count = 3
    """kind http: tries with growing pauses before the call has failed."""


class AlgorithmSection(Section):
    num_steps: Count = 100
    """Number of training steps."""
    prompts_per_step: Count = 32
    """Prompts (groups) in a step."""
    group_size: Count = 8
    """Trajectories per prompt."""
    updates_per_step: Count = 1
    """Optimizer updates in a step, over disjoint sets of whole groups."""
    advantage: Literal["group_std", "group_mean"] = "group_std"
    """group_std: (reward - mean) / (std + 1e-6) in the group; group_mean: reward - mean."""
    clip_low: Positive = 0.2
    """Lower clip of the probability ratio: 1 - clip_low."""
    clip_high: Positive = 0.2
    """Upper clip of the probability ratio: 1 + clip_high."""
    importance_cap: Positive | None = 2.0
    """Token weights trainer / engine probability are cut at this value (truncated importance sampling); null is off."""
    kl_weight: NonNegative = 0.0
    """Weight of the KL divergence to the base model (k3 estimate per token) in the loss; 0 is off and costs nothing."""


class OptimizerSection(Section):
    learning_rate: NonNegative = 1e-5
    """Peak learning rate of AdamW."""
    betas: tuple[Share, Share] = (0.9, 0.99)
    """AdamW betas."""
    epsilon: Positive = 1e-8
    """AdamW epsilon."""
    weight_decay: NonNegative = 0.0
    """AdamW weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    warmup_steps: Natural = 0
    """Steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls from its peak to final_share of it at the last step."""
    final_share: Share = 0.0
    """Share of the peak rate at the end of the schedule."""
    schedule_steps: Count | None = None
    """Steps the schedule spans; default is algorithm.num_steps."""


class RolloutSection(Section):
    staleness: Literal[0, 1] = 0
    """1 samples the next step while this one is trained, under the adapter of exactly one step before; needs engines
    and ranks of their own (cluster.colocate: false). 0 samples every step under the newest adapter."""
    temperature: Positive = 1.0
    """Sampling temperature in training; the trainer uses the same."""
    max_response_tokens: Count = 512
    """Longest reply of one turn."""
    max_prompt_tokens: Count | None = None
    """Longest first prompt after image expansion; default is model.max_tokens - max_response_tokens."""
    request_timeout_seconds: Seconds = 600.0
    """Deadline of one engine request."""
    max_failed_share: Share = 0.25
    """A step in which a larger share of episodes failed pauses the run until the failing service answers again."""
    retries: Natural = 2
    """How often an episode that failed through infrastructure is tried again, with the same seed."""
    pause_probe_seconds: Seconds = 10.0
    """While paused, failed episodes are tried again after this long."""
    pause_limit_seconds: Seconds = 3600.0
    """A pause longer than this ends the run with the reason."""


class EngineSection(Section):
    gpu_memory_share: Share = 0.5
    """Share of GPU memory for the engine while it is awake."""
    cache_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    """Bytes of KV cache; default is what gpu_memory_share leaves (GPU) or 1 GiB (CPU)."""
    max_sequences: Count = 128
    """Sequences decoded at the same time by one engine."""
    eager: bool | None = None
    """Do not capture graphs; default is true on CPU and false on GPU."""
    tensor_parallel: Count = 1
    """GPUs of one engine."""
    options: dict[str, Any] = {}
    """More vLLM engine arguments, passed as they are."""


class TrainingSection(Section):
    micro_batch_tokens: Count = 16_384
    """Tokens packed into one forward and backward of one rank."""
    gradient_checkpointing: bool | None = None
    """Recompute activations in the backward; default is true on GPU and false on CPU."""
    threads: Count = 1
    """CPU threads of one rank."""
    collective_timeout_seconds: Seconds = 600.0
    """Deadline of one collective of the ranks."""
    recheck_every_steps: Natural = 50
    """Every so many steps one sample per rank is computed again on another rank and must be bit-equal; 0 is never."""


class EvaluateSection(Section):
    every_steps: Natural = 10
    """Evaluate after every so many steps, at the start and at the end; 0 is never."""
    prompts: Count | None = None
    """Use the first so many held-out prompts; default is all."""
    samples: Count = 1
    """Sampled replies per prompt (the greedy one comes on top)."""
    temperature: Positive = 1.0
    """Temperature of the sampled replies."""
    success_reward: float = 1.0
    """A trajectory with at least this reward counts as a success (accuracy)."""
    stop_at: Share | None = None
    """End the run when sampled held-out accuracy reaches this."""
    stop_after: Count | None = None
    """End the run when so many evaluations in a row brought no new best."""


class CheckpointSection(Section):
    every_steps: Count = 1
    """Write optimizer and RNG state after every so many steps."""
    keep: Count = 2
    """Checkpoints kept on disk."""
    keep_adapters: Count = 50
    """Newest adapters kept on disk, besides the best one and those a kept checkpoint needs."""
    keep_trajectories: bool = True
    """Keep trajectories and images of steps older than the oldest kept checkpoint."""


class WandbSection(Section):
    project: str
    """W&B project."""
    entity: str | None = None
    """W&B entity."""


class MlflowSection(Section):
    uri: str
    """MLflow tracking URI."""
    experiment: str = "argusrl"
    """MLflow experiment."""


class ObserveSection(Section):
    display: Literal["auto", "rich", "plain", "none"] = "auto"
    """Live panel, plain lines, or nothing; auto is the panel where there is a terminal."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    wandb: WandbSection | None = None
    """Send metrics to Weights & Biases, too."""
    mlflow: MlflowSection | None = None
    """Send metrics to MLflow, too."""
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Serve metrics to Prometheus at this port of the driver's host; null is off (Ray's exporters have them anyway)."""


class RecoverySection(Section):
    max_restarts: Natural = 10
    """The supervisor restarts the driver at most this often per window."""
    window_seconds: Seconds = 3600.0
    """Length of that window."""
    grace_seconds: Seconds = 20.0
    """Time to seal everything after SIGTERM or Ctrl-C."""
    driver_silence_seconds: Seconds = 60.0
    """A driver whose heartbeat is older than this is killed and restarted."""
    max_heals: Natural = 100
    """Engines, ranks and episode workers are re-made in the running driver at most this often per window."""
    hang_seconds: Seconds = 60.0
    """A worker that for so long neither makes progress nor answers is taken for hung and replaced."""
    standby_engines: Natural = 1
    """CPU: processes with vLLM imported, kept beside the engines to take the place of one that dies; 0 is off."""
    min_ranks: Count | None = None
    """Go on with as few ranks as this while a lost one is missing; null waits for its replacement."""
    node_wait_seconds: Seconds = 1800.0
    """Wait at most so long for the replacement of a lost node."""
    storage_wait_seconds: Seconds = 600.0
    """Wait at most so long for a run folder that went away, or a full disk that somebody empties."""
    min_free_bytes: Natural = 64 << 20
    """A step begins only with so much free space in the run folder, on top of what the step itself writes."""
    max_sample_attempts: Count = 3
    """A sample that ended the same step this often is left out of it, with a record."""
    orphan_seconds: Seconds = 600.0
    """Workers without a driver for so long end themselves."""


class Config(Section):
    """A whole recipe with every default filled in."""

    run: RunSection = RunSection()
    model: ModelSection
    adapter: AdapterSection = AdapterSection()
    data: DataSection
    environment: EnvironmentSection = EnvironmentSection()
    rewards: Annotated[list[RewardSection], Field(min_length=1)]
    algorithm: AlgorithmSection = AlgorithmSection()
    optimizer: OptimizerSection = OptimizerSection()
    rollout: RolloutSection = RolloutSection()
    engine: EngineSection = EngineSection()
    training: TrainingSection = TrainingSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    cluster: ClusterSection = ClusterSection()
    observe: ObserveSection = ObserveSection()
    recovery: RecoverySection = RecoverySection()

    def serves_merged(self, dtype: str) -> bool:
        """Whether engines of this type merge the adapter into their weights; two live versions they cannot."""
        return self.adapter.merged_in(dtype) and not self.rollout.staleness
