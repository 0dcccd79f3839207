"""Rules between the values of a recipe. Each message says what is wrong, with the values, and what to do."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from argusrl.config.kubernetes_checks import kubernetes_problems
from argusrl.config.secrets import SECRET_NAME, is_secret_reference
from argusrl.config.sections import Config, RewardSection
from argusrl.errors import ConfigError

LORA_RANKS_SERVED = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks for which vLLM has kernels."""

_SUPPLIED_FUNCTION = re.compile(r"^[^:]+:[A-Za-z_][A-Za-z0-9_.]*$")


def problems(config: Config) -> list[str]:
    """Every broken rule, in the order of the sections; an empty list is a sound recipe. Touches no file."""
    groups = (_model, _adapter, _data, _environment, _rewards, _algorithm, _optimizer, _rollout, _evaluate, _cluster)
    return [problem for group in groups for problem in group(config)]


def file_problems(config: Config) -> list[str]:
    """Files and modules the recipe names that are not on this machine.

    Nothing is said of what only pods see: files below the mount of their file system, where that is not mounted here.
    """
    found: list[str] = []
    model = config.model.path
    if model.startswith((".", "/", "~")) and not _exists(model, config):
        found.append(f"model.path: no such folder: {model}")
    paths = {
        "model.chat_template": config.model.chat_template,
        "adapter.initial": config.adapter.initial,
        "data.train": config.data.train if config.data.kind == "files" else None,
        "data.heldout": config.data.heldout if config.data.kind == "files" else None,
    }
    for key, path in paths.items():
        if path is not None and not _exists(path, config):
            found.append(
                f"{key}: no such file or folder: {path} (relative paths: recipe's folder, then working folder)"
            )
    functions = {"data.generator": config.data.generator, "environment.factory": config.environment.factory}
    functions |= {f"rewards.{index}.function": reward.function for index, reward in enumerate(config.rewards)}
    for key, function in functions.items():
        name = function.rpartition(":")[0] if function else ""
        if name and not _module_exists(name) and not (name.endswith(".py") and _exists(name, config)):
            found.append(f"{key}: no such file or module: {name}")
    return found


def require(config: Config, files: bool = False) -> None:
    """Raise ConfigError with all problems, if there are any; with `files`, those of files as well."""
    found = problems(config) + (file_problems(config) if files else [])
    if found:
        raise ConfigError(found)


def _exists(path: str | Path, config: Config) -> bool:
    here, kubernetes = Path(path).expanduser(), config.cluster.kubernetes
    if kubernetes is not None and here.is_relative_to(kubernetes.volume.mount) and not kubernetes.volume.mount.is_dir():
        return True  # as far as can be told here
    return here.exists()


def _module_exists(name: str) -> bool:
    if name.endswith(".py") or "/" in name:
        return Path(name).expanduser().is_file()
    try:
        return importlib.util.find_spec(name.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False


def _model(config: Config) -> Iterator[str]:
    model, rollout = config.model, config.rollout
    if rollout.max_response_tokens >= model.max_tokens:
        yield (
            f"rollout.max_response_tokens ({rollout.max_response_tokens:,}) leaves no room for a prompt in "
            f"model.max_tokens ({model.max_tokens:,}); make one smaller or the other larger"
        )
    elif rollout.max_prompt_tokens and rollout.max_prompt_tokens + rollout.max_response_tokens > model.max_tokens:
        yield (
            f"rollout.max_prompt_tokens ({rollout.max_prompt_tokens:,}) + rollout.max_response_tokens "
            f"({rollout.max_response_tokens:,}) is more than model.max_tokens ({model.max_tokens:,})"
        )
    if model.min_pixels and model.max_pixels and model.min_pixels > model.max_pixels:
        yield f"model.min_pixels ({model.min_pixels:,}) is above model.max_pixels ({model.max_pixels:,})"


def _adapter(config: Config) -> Iterator[str]:
    adapter = config.adapter
    if adapter.kind == "lora" and adapter.rank not in LORA_RANKS_SERVED:
        served = ", ".join(map(str, LORA_RANKS_SERVED))
        yield f"adapter.rank {adapter.rank}: vLLM does not serve this LoRA rank; it serves {served}"
    if adapter.kind == "full" and adapter.initial is not None:
        yield "adapter.initial: kind full has no adapter to start from; merge it into the model first, or use kind lora"
    if adapter.kind == "full" and adapter.serving != "auto":
        yield f"adapter.serving {adapter.serving}: kind full serves the trained weights themselves; leave serving out"
    if adapter.kind == "full" and config.algorithm.kl_weight:
        yield (
            f"algorithm.kl_weight {config.algorithm.kl_weight:g}: the reference is the model without its adapter, and "
            "kind full keeps none; set kl_weight 0, or use kind lora"
        )
    if adapter.target == []:
        yield "adapter.target: an empty list adapts nothing; name modules, or use language"


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.kind == "files" and data.train is None:
        yield "data.train: kind files needs a file or folder with training rows"
    if data.kind == "generated":
        if data.generator is None:
            yield "data.generator: kind generated needs a function, module:function or file.py:function"
        if data.train_size is None:
            yield "data.train_size: kind generated needs to know how many prompts to make"
    if data.kind == "environment":
        if config.environment.kind == "single_turn":
            yield "data.kind environment: a single_turn environment has no starts of its own; set environment.kind"
        elif not config.environment.starts and data.train_size is None:
            yield "data.train_size: how many seeds to train on? Set it, or list environment.starts"
    if data.generator is not None:
        yield from _function("data.generator", data.generator)


def _environment(config: Config) -> Iterator[str]:
    environment = config.environment
    if environment.kind == "single_turn" and environment.max_turns > 1:
        yield f"environment.max_turns {environment.max_turns}: a single_turn environment has one turn; set it to 1"
    if environment.kind == "gymnasium" and environment.id is None and environment.factory is None:
        yield "environment.id: kind gymnasium needs a registered id, or a factory"
    if environment.kind == "gymnasium" and not environment.actions:
        yield "environment.actions: kind gymnasium needs the words a model may answer, e.g. {left: 0, right: 2}"
    if environment.kind == "python" and environment.factory is None:
        yield "environment.factory: kind python needs a class, module:Class or file.py:Class"
    if environment.factory is not None:
        yield from _function("environment.factory", environment.factory)
    yield from _pattern("environment.action_pattern", environment.action_pattern, group=True)
    trained = {json.dumps(start, sort_keys=True) for start in environment.starts}
    shared = [
        index for index, start in enumerate(environment.heldout_starts) if json.dumps(start, sort_keys=True) in trained
    ]
    if shared:
        yield f"environment.heldout_starts: {_indices(shared)} are training starts, too; hold them out"


def _rewards(config: Config) -> Iterator[str]:
    for index, reward in enumerate(config.rewards):
        yield from _reward(f"rewards.{index}", reward)
        if reward.kind == "environment" and config.environment.kind == "single_turn":
            yield f"rewards.{index}: a single_turn environment pays no reward; use another kind"
    names = Counter(reward.name or reward.kind for reward in config.rewards)
    for name, count in names.items():
        if count > 1:
            yield f"rewards: {count} rewards are called '{name}'; give each a name of its own"
    if all(reward.weight == 0 for reward in config.rewards):
        yield "rewards: every weight is 0, so every reward is 0 and nothing is learnt"


def _reward(key: str, reward: RewardSection) -> Iterator[str]:
    needed = {"python": "function", "http": "url", "format": "pattern"}.get(reward.kind)
    if needed and not getattr(reward, needed):
        yield f"{key}.{needed}: a {reward.kind} reward needs it"
    if reward.function:
        yield from _function(f"{key}.function", reward.function)
        if reward.kind != "python":
            yield f"{key}.function: only a python reward has one; this is kind {reward.kind}"
    if reward.pattern:
        yield from _pattern(f"{key}.pattern", reward.pattern, group=reward.kind != "format")
    if reward.token is not None and not is_secret_reference(reward.token):
        yield f"{key}.token: given in clear text; write env:NAME or file:PATH, and rotate the token"
    if reward.url:
        try:
            parts = urlsplit(reward.url)
        except ValueError:
            parts = urlsplit("")
        if parts.password or parts.username:
            yield f"{key}.url: holds credentials; use {key}.token: env:NAME"
        elif parts.scheme not in ("http", "https") or not parts.hostname:
            yield f"{key}.url: must be http://… or https://…, got {reward.url}"


def _algorithm(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if algorithm.group_size == 1:
        yield "algorithm.group_size 1: the advantage in a group of one is always 0; use at least 2"
    if algorithm.updates_per_step > algorithm.prompts_per_step:
        yield (
            f"algorithm.updates_per_step ({algorithm.updates_per_step}) is above algorithm.prompts_per_step "
            f"({algorithm.prompts_per_step}): every update needs at least one whole group"
        )
    if algorithm.clip_low >= 1:
        yield f"algorithm.clip_low {algorithm.clip_low}: must be below 1, or the lower clip never acts"


def _optimizer(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    for index, beta in enumerate(optimizer.betas):
        if beta >= 1:
            yield f"optimizer.betas.{index} {beta}: must be below 1"
    span = optimizer.schedule_steps or config.algorithm.num_steps
    if optimizer.warmup_steps > span:
        yield f"optimizer.warmup_steps ({optimizer.warmup_steps}) is longer than the schedule ({span} steps)"


def _rollout(config: Config) -> Iterator[str]:
    rollout, environment = config.rollout, config.environment
    if rollout.pause_probe_seconds > rollout.pause_limit_seconds:
        yield "rollout.pause_probe_seconds is above rollout.pause_limit_seconds: a pause would end before it probes"
    if environment.step_timeout_seconds > environment.episode_timeout_seconds:
        yield "environment.step_timeout_seconds is above environment.episode_timeout_seconds"
    if rollout.staleness:
        yield from _staleness(config)


def _staleness(config: Config) -> Iterator[str]:
    """The next step is sampled while this one is trained: two adapters are live, and both have to have room."""
    if config.cluster.colocate:
        yield "rollout.staleness: engines sample while ranks train, so set cluster.colocate: false, or staleness: 0"
    if config.adapter.kind == "full":
        yield "rollout.staleness: kind full replaces the engine's weights, so only one version is live; use kind lora"
    elif config.adapter.serving == "merged":
        yield "rollout.staleness: merged weights serve one version at a time; set adapter.serving: lora"
    if config.algorithm.importance_cap is None:
        yield (
            "rollout.staleness: samples are of an earlier policy, and only the importance weights correct for that; "
            "set algorithm.importance_cap"
        )


def _evaluate(config: Config) -> Iterator[str]:
    evaluate, data, environment = config.evaluate, config.data, config.environment
    if evaluate.every_steps == 0:
        for name in ("stop_at", "stop_after"):
            if getattr(evaluate, name) is not None:
                yield f"evaluate.{name}: needs evaluations; set evaluate.every_steps above 0"
        return
    off = "or evaluate.every_steps: 0 to train without evaluation"
    if data.kind == "files" and data.heldout is None:
        yield f"data.heldout: evaluation needs held-out rows; set it, {off}"
    if data.kind == "files" and data.train is not None and data.heldout == data.train:
        yield "data.heldout: is the same as data.train; evaluation would not be held out"
    sized = data.heldout_size is not None or evaluate.prompts is not None
    if data.kind == "generated" and not sized:
        yield f"data.heldout_size: evaluation needs to know how many prompts to make; set it, {off}"
    if data.kind == "environment" and not environment.heldout_starts and not sized:
        yield f"data.heldout_size: evaluation needs held-out seeds; set it, list environment.heldout_starts, {off}"


def _cluster(config: Config) -> Iterator[str]:
    cluster = config.cluster
    if cluster.colocate and cluster.engines is not None:
        yield "cluster.engines: only with colocate: false; colocated, every slot has an engine"
    if not cluster.colocate:
        if cluster.slots is None or cluster.engines is None:
            yield "cluster.colocate false: set cluster.slots (all bundles) and cluster.engines (those for engines)"
        elif cluster.engines >= cluster.slots:
            yield f"cluster.engines ({cluster.engines}) must be below cluster.slots ({cluster.slots}): ranks need slots"
    if cluster.device == "cpu" and config.engine.tensor_parallel > 1:
        yield "engine.tensor_parallel: works on GPUs only; set it to 1 with cluster.device: cpu"
    yield from kubernetes_problems(config)
    for name, value in cluster.environment.items():
        if SECRET_NAME.search(name) and value and not is_secret_reference(value):
            yield f"cluster.environment.{name}: looks like a secret in clear text; write env:{name} or file:PATH"


def _function(key: str, text: str) -> Iterator[str]:
    if not _SUPPLIED_FUNCTION.match(text):
        yield f"{key}: must be module:name or file.py:name, got {text}"


def _pattern(key: str, text: str, group: bool) -> Iterator[str]:
    try:
        compiled = re.compile(text)
    except re.error as error:
        yield f"{key}: not a regular expression: {error}"
        return
    if group and compiled.groups < 1:
        yield f"{key}: needs a group in parentheses around the part that counts, got {text}"


def _indices(indices: list[int]) -> str:
    shown = ", ".join(map(str, indices[:10]))
    return f"items {shown}" + (f" and {len(indices) - 10} more" if len(indices) > 10 else "")
