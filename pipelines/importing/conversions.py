"""Conversions of values whose unit or meaning differs, by the names that other_tools.toml gives.

A conversion takes the value of an option and all options, and returns our value; None leaves the
setting out, since the value is off there, or is so here without a setting.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path, PurePath
from typing import Any, Protocol

PROMPT_FILES = (".parquet", ".jsonl", ".json", ".lance", ".csv")
SINKS = ("mlflow", "tensorboard", "wandb")
OVERLONG_BUFFERS = (
    "reward.reward_kwargs.overlong_buffer_cfg",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward_model.overlong_buffer",
)
"""Where versions of verl have DAPO's penalty of long completions."""


class ByHand(Exception):
    """The setting has to be set by hand, for a reason."""


class NoCounterpart(Exception):
    """The value has no counterpart, for a reason."""


class AllOptions(Protocol):
    def get(self, option: str) -> Any:
        """Return the value of an option, or the tool's default."""

    def is_given(self, option: str) -> bool:
        """Return whether the file gives the option, and not as null."""

    def has(self, option: str) -> bool:
        """Return whether the file gives the option, perhaps as null."""

    def ours(self, setting: str) -> Any:
        """Return the value of one of our settings, as converted; None if it is not set."""

    @property
    def folder(self) -> Path:
        """Where the file is."""


Conversion = Callable[[Any, AllOptions], Any]


# Plain values


def text(value: Any, options: AllOptions) -> str:
    return str(value)


def path_or_name(value: str, options: AllOptions) -> str:
    return str(Path(value).expanduser()) if value.startswith("~") else value


def texts(value: Any, options: AllOptions) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def number(value: Any, options: AllOptions) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ByHand(f"{value!r} is not a number") from None


def numbers(value: Sequence[Any], options: AllOptions) -> list[float]:
    return [number(each, options) for each in value]


def positive(value: Any, options: AllOptions) -> int | None:
    return int(value) if number(value, options) > 0 else None


def every_steps(value: Any, options: AllOptions) -> int:
    if number(value, options) < 1:
        raise ByHand(f"{value} is a share of all steps: set a number of steps")
    return int(value)


def top_k(value: int, options: AllOptions) -> int:
    return value if 0 < value < 10**8 else 0


def greedy(value: bool, options: AllOptions) -> float | None:
    return 0.0 if value else None


def betas(value: Any, options: AllOptions) -> list[float]:
    prefix = "actor.optimizer.beta" if options.get("actor.optimizer.beta1") else "adam_beta"
    return [options.get(f"{prefix}1"), options.get(f"{prefix}2")]


def file(value: Any, options: AllOptions) -> str | None:
    files = [value] if isinstance(value, str) else list(value)
    if len(files) > 1:
        raise ByHand(
            f"{len(files)} files: give each a [[sources]] or [[evaluation.held_out]] table"
        )
    return path_or_name(files[0], options) if files else None


def dataset(value: str, options: AllOptions) -> str | None:
    return None if _is_file(value) else f"datasets:{value}"


def dataset_file(value: str, options: AllOptions) -> str | None:
    return path_or_name(value, options) if _is_file(value) else None


def held_out_file(value: str, options: AllOptions) -> str:
    if _is_file(value):
        return value
    raise ByHand("of a hub dataset, prompts.num_held_out rows are held out, or its held_out_split")


def _is_file(value: str) -> bool:
    return PurePath(value).suffix in PROMPT_FILES or value.startswith(("/", "./", "~"))


def trl_question_field(value: Any, options: AllOptions) -> str:
    return "prompt"


def verl_answer_field(value: Any, options: AllOptions) -> str:
    return "reward_model.ground_truth"


def lora_targets(value: Any, options: AllOptions) -> str | None:
    return (value if isinstance(value, str) else ",".join(value)) or None


def lora_alpha(value: Any, options: AllOptions) -> float | None:
    return number(value, options) if options.ours("trainer.lora.rank") else None


def sinks(value: Any, options: AllOptions) -> str | None:
    names = [value] if isinstance(value, str) else list(value)
    kept = [each for each in names if each in SINKS]
    if unsupported := [each for each in names if each not in (*SINKS, "console", "none")]:
        raise NoCounterpart(f"trackers are {', '.join(SINKS)}, and not {', '.join(unsupported)}")
    return ",".join(kept) or None


# Batches and steps


def completions(value: int, options: AllOptions) -> int:
    if value < 1:  # verl that trains and generates at once counts other batches
        raise ByHand(f"{value} prompts: set how many completions a step has")
    return int(value * _needed(options, "controller.group_size"))


def minibatches(value: int, options: AllOptions) -> int:
    batch_size = int(_needed(options, "controller.batch_size"))
    return max(1, ceil(batch_size / completions(value, options)))


def _needed(options: AllOptions, setting: str) -> Any:
    value = options.ours(setting)
    if value is None:
        raise ByHand(f"it depends on {setting}, which is not known here")
    return value


def trl_batch(value: Any, options: AllOptions) -> int:
    if size := options.get("generation_batch_size"):
        return int(size)
    steps = options.get("steps_per_generation") or options.get("gradient_accumulation_steps")
    return int(options.get("per_device_train_batch_size") * steps)


def trl_minibatches(value: int, options: AllOptions) -> int:
    updated = int(options.get("per_device_train_batch_size"))
    updated *= int(options.get("gradient_accumulation_steps"))
    return max(1, ceil(trl_batch(value, options) / updated))


def trl_steps(value: int, options: AllOptions) -> int | None:
    if value <= 0:
        return None
    return ceil(value / (options.ours("algorithm.num_minibatches") or 1))


def epochs(value: float, options: AllOptions) -> int:
    path = options.ours("prompts.path")
    rows = None if path is None else _num_rows(options.folder / path)
    batch_size, group_size = (
        _needed(options, f"controller.{each}_size") for each in ("batch", "group")
    )
    per_step = float(batch_size / group_size)
    if rows is None:
        raise ByHand(f"{value:g} * N / {per_step:g} steps, where N is the number of prompts")
    return max(1, round(value * rows / per_step))


def _num_rows(path: Path) -> int | None:
    if not path.is_file():
        return None
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return int(pq.ParquetFile(path).metadata.num_rows)
    if path.suffix == ".jsonl":
        with path.open("rb") as lines:
            return sum(bool(line.strip()) for line in lines)
    return None


def warmup(value: float, options: AllOptions) -> int | None:
    if value >= 1:
        return round(value)
    if value <= 0:
        return None
    steps = options.ours("num_steps")
    if steps is None:
        raise ByHand(f"{value:g} of all steps")
    return round(value * steps) or None


def context(value: int, options: AllOptions) -> int:
    return int(value + _needed(options, "generation.max_new_tokens"))


def micro_batch_tokens(value: int, options: AllOptions) -> int:
    return int(max(value, options.ours("generation.max_model_len") or 0))


# GPUs


def verl_trainers(value: Any, options: AllOptions) -> int:
    num_gpus, size = _gpus(options)
    return int(max(1, num_gpus - size * verl_generators(value, options)))


def verl_generators(value: Any, options: AllOptions) -> int:
    num_gpus, size = _gpus(options)
    return int(max(1, num_gpus // 2 // size))


def verl_schedule(value: Any, options: AllOptions) -> str | None:
    return "sync" if _gpus(options)[0] == 1 else None


def _gpus(options: AllOptions) -> tuple[int, int]:
    """Return the number of GPUs, and of those that a generator has."""
    num_gpus = options.get("trainer.n_gpus_per_node") * (options.get("trainer.nnodes") or 1)
    return num_gpus, options.get("actor_rollout_ref.rollout.tensor_model_parallel_size") or 1


def device(value: int, options: AllOptions) -> str:
    return "cuda" if value else "cpu"


def verl_staleness(value: int, options: AllOptions) -> int | None:
    return None if options.get("trainer.v1.trainer_mode") in (None, "sync") else value


def trainer_ranks(value: int, options: AllOptions) -> int | None:
    if value <= 1:
        return None
    num_trainers = _needed(options, "cluster.num_trainers")
    if num_trainers % value:
        raise NoCounterpart(f"{value} does not divide the {num_trainers} trainer ranks here")
    return value


def shared_gpu_share(value: float, options: AllOptions) -> float:
    if _gpus(options)[0] > 1:
        raise NoCounterpart("it is the share of a GPU that training uses, too: there is none here")
    return number(value, options)


def single_gpu_only(value: bool, options: AllOptions) -> None:
    return None


def backend_engine(value: str, options: AllOptions) -> str | None:
    return "vllm" if re.match(r"(sglang|vllm)\b", value) else None


def backend_replicas(value: str, options: AllOptions) -> int:
    return _sizes(value, engine=True).get("d", 1)


def backend_tensor(value: str, options: AllOptions) -> int:
    return _sizes(value, engine=True).get("t", 1) * _sizes(value, engine=True).get("p", 1)


def backend_ranks(value: str, options: AllOptions) -> int:
    sizes = _sizes(value, engine=False)
    return sizes.get("d", 1) * sizes.get("t", 1) * sizes.get("p", 1) * sizes.get("c", 1)


def backend_context(value: str, options: AllOptions) -> int | None:
    return _sizes(value, engine=False).get("c")


def _sizes(value: str, *, engine: bool) -> dict[str, int]:
    """Return the parallel sizes of `sglang:d4t2`, or of one part of `sglang.d4t2+fsdp:d8`."""
    parts = value.split("+")
    matches = re.match(r"(?:\w+[:.])?((?:[a-z]\d+)+)$", parts[0 if engine else -1])
    if matches is None:
        raise ByHand(f"{value!r} is not like 'fsdp:d4' or 'sglang:d2t2'")
    return {letter: int(size) for letter, size in re.findall(r"([a-z])(\d+)", matches[1])}


def sglang_share(value: float, options: AllOptions) -> float | None:
    return number(value, options) if "sglang" in str(options.get("rollout.backend")) else None


# Algorithms


def trl_algorithm(value: str, options: AllOptions) -> str:
    if options.get("importance_sampling_level") == "sequence":
        return "gspo"
    loss = options.get("loss_type")
    if loss in ("cispo", "sapo"):
        return str(loss)
    if loss not in ("grpo", "dr_grpo", "dapo", "bnpo"):
        raise ByHand(f"there is no loss {loss!r}: choose an algorithm")
    corrected = options.get("vllm_importance_sampling_correction")
    return "decoupled_ppo" if corrected in (None, True) else "ppo"


def trl_aggregation_tokens(value: str, options: AllOptions) -> int | None:
    return options.get("max_completion_length") if value == "dr_grpo" else None


def trl_weight_rule(value: str, options: AllOptions) -> str:
    rules = {"token_truncate": "truncate", "token_mask": "mask", "sequence_mask": "mask_sequence"}
    if value not in rules:
        raise NoCounterpart(f"there is no rule like {value!r}")
    return rules[value]


def trl_rewards(value: Any, options: AllOptions) -> list[dict[str, Any]] | None:
    functions = options.get("GRPOTrainer.reward_funcs")
    if functions is None:
        return None
    functions = [functions] if isinstance(functions, str) else functions
    weights = options.get("reward_weights") or [1.0] * len(functions)
    if models := [each for each in functions if not isinstance(each, str) or ":" not in each]:
        raise ByHand(
            f"{models[0]!r} is a reward model: verifier = 'reward_model' with its settings"
        )
    pairs = zip(functions, weights, strict=False)
    return [{"verifier": each, "weight": number(w, options)} for each, w in pairs]


def sapo_temperatures(value: Any, options: AllOptions) -> list[float]:
    for names in (
        ("sapo_temperature_pos", "sapo_temperature_neg"),
        ("actor_rollout_ref.actor.tau_pos", "actor_rollout_ref.actor.tau_neg"),
        ("actor.sapo_tau_pos", "actor.sapo_tau_neg"),
    ):
        if any(map(options.is_given, names)):
            pairs = zip(names, (1.0, 1.05), strict=True)
            return [float(options.get(name) or default) for name, default in pairs]
    return [1.0, 1.05]


def critic_only(value: float, options: AllOptions) -> float | None:
    if options.ours("algorithm.name") == "ppo_critic":
        return number(value, options)
    if value != 1:
        raise NoCounterpart("there is no critic: discount and lambda are 1")
    return None


def verl_algorithm(value: Any, options: AllOptions) -> str:
    estimator = options.get("algorithm.adv_estimator")
    loss = options.get("actor_rollout_ref.actor.policy_loss.loss_mode")
    named = {"gspo": "gspo", "sapo": "sapo", "cispo": "cispo", "dppo_tv": "dppo"}
    if loss not in ("vanilla", *named):
        raise ByHand(f"there is no loss {loss!r}: choose an algorithm")
    if loss in named:
        return named[loss]
    if estimator == "gae":
        return "ppo_critic"
    if estimator in ("reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        return "reinforce_plus_plus"
    bypass = options.get("algorithm.rollout_correction.bypass_mode")
    return "ppo" if bypass else "decoupled_ppo"


def verl_advantage(value: Any, options: AllOptions) -> str | None:
    estimator = options.get("algorithm.adv_estimator").removesuffix("_vectorized")
    if estimator == "grpo":
        by_std = options.get("algorithm.norm_adv_by_std_in_grpo")
        return "grpo" if by_std in (None, True) else "dr_grpo"
    rules = {
        "gae": "gae",
        "rloo": "rloo",
        "reinforce_plus_plus": "batch_norm",
        "reinforce_plus_plus_baseline": "reinforce_baseline",
    }
    if estimator not in rules:
        raise ByHand(f"there is no advantage {estimator!r}: choose one, such as rloo")
    return rules[estimator]


def verl_clip(value: float, options: AllOptions) -> float:
    if options.get("actor_rollout_ref.actor.policy_loss.loss_mode") == "dppo_tv":
        raise ByHand("DPPO's clip is algorithm.max_divergence")
    return number(value, options)


def verl_clip_ratio(value: float, options: AllOptions) -> float:
    if options.get("actor_rollout_ref.actor.clip_ratio_low") is not None:
        raise NoCounterpart("clip_ratio_low and clip_ratio_high count instead, 0.2 by default")
    return verl_clip(value, options)


def verl_aggregation_tokens(value: Any, options: AllOptions) -> int | None:
    if options.get("actor_rollout_ref.actor.loss_agg_mode") != "seq-mean-token-sum-norm":
        return None
    tokens = options.get("actor_rollout_ref.actor.loss_scale_factor")
    return int(tokens or options.ours("generation.max_new_tokens"))


def verl_kl_in(value: bool, options: AllOptions) -> str | None:
    places = _kl_places(options)
    if len(places) > 1:
        raise ByHand("verl has the KL term in loss and reward, here it is in one: set kl_in, too")
    return next(iter(places), None)


def _kl_places(options: AllOptions) -> list[str]:
    switches = {
        "loss": "actor_rollout_ref.actor.use_kl_loss",
        "reward": "algorithm.use_kl_in_reward",
    }
    return [place for place, option in switches.items() if options.get(option)]


def verl_kl(value: float, options: AllOptions) -> float | None:
    names = {
        "loss": "actor_rollout_ref.actor.kl_loss_coef",
        "reward": "algorithm.kl_ctrl.kl_coef",
    }
    places = _kl_places(options)
    return number(options.get(names[places[0]]), options) if places else None


def verl_kl_estimator(value: str, options: AllOptions) -> str | None:
    places = _kl_places(options)
    if not places:
        return None
    in_loss = places[0] == "loss"
    theirs = "actor_rollout_ref.actor.kl_loss_type" if in_loss else "algorithm.kl_penalty"
    estimators = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
    estimator = estimators.get(str(options.get(theirs)))
    if estimator is None or (estimator == "k1" and in_loss):
        raise NoCounterpart(
            f"{options.get(theirs)!r} is no estimator of it here: k3 is the default"
        )
    return estimator


def verl_weight_rule(value: str, options: AllOptions) -> str:
    if value == "token":
        return "truncate"
    raise NoCounterpart(f"there is no truncation by {value!r}")


def verl_weight_cap(value: Any, options: AllOptions) -> float | None:
    rule = options.get("algorithm.rollout_correction.rollout_is")
    return number(value, options) if rule == "token" else None


def verl_rewards(value: Any, options: AllOptions) -> list[dict[str, Any]]:
    sections = ("reward.custom_reward_function", "custom_reward_function")
    section = next((each for each in sections if options.get(f"{each}.path")), None)
    if section is None:
        raise ByHand('verl chooses by data_source: for its math sets, verifier = "math"')
    path = PurePath(options.get(f"{section}.path"))
    function = options.get(f"{section}.name") or "compute_score"
    if path.is_absolute() or ".." in path.parts:
        raise ByHand(f'put {path.name} on PYTHONPATH: verifier = "{path.stem}:{function}"')
    return [{"verifier": f"{'.'.join(path.with_suffix('').parts)}:{function}"}]


def verl_overlong(value: Any, options: AllOptions) -> list[int] | None:
    for section in OVERLONG_BUFFERS:
        if options.get(f"{section}.enable"):
            last = int(options.ours("generation.max_new_tokens"))
            return [last - int(options.get(f"{section}.len")), last]
    return None


def areal_algorithm(value: Any, options: AllOptions) -> str:
    if options.is_given("critic.path"):
        return "ppo_critic"
    if options.get("actor.use_sapo_loss"):
        return "sapo"
    if options.get("actor.m2_threshold"):
        return "m2po"
    if options.get("actor.importance_sampling_level") == "sequence":
        return "gspo"
    return "decoupled_ppo" if options.get("actor.use_decoupled_loss") else "ppo"


def areal_proximal(value: str, options: AllOptions) -> str | None:
    if areal_algorithm(None, options) != "decoupled_ppo":
        return None
    return "interpolated" if value == "loglinear" else "recomputed"


def areal_advantage(value: Any, options: AllOptions) -> str:
    if options.is_given("critic.path"):
        return "gae"
    norms = {}
    for norm in ("reward_norm", "adv_norm"):
        levels = [f"actor.{norm}.{each}_level" for each in ("mean", "std")]
        if any(map(options.has, levels)):
            given = (options.get(each) if options.has(each) else "batch" for each in levels)
            norms[norm] = tuple(each or "none" for each in given)
    reward, advantage = norms.get("reward_norm"), norms.get("adv_norm")
    match reward or advantage:
        case ("group", "group"):
            return "grpo"
        case ("group", "none") if options.get("actor.reward_norm.mean_leave1out"):
            return "rloo"
        case ("group", "none"):
            return "reinforce_baseline" if advantage == ("none", "batch") else "dr_grpo"
        case ("group", "batch"):
            return "reinforce_baseline"
        case ("batch", _):
            return "batch_norm"
    raise ByHand("the reward itself is no advantage here: choose one, such as grpo or batch_norm")


def areal_overlong(value: Any, options: AllOptions) -> list[int] | None:
    if not options.get("actor.overlong_reward_penalty"):
        return None
    last = int(options.ours("generation.max_new_tokens"))
    return [last - options.get("actor.overlong_tokens"), last]


def areal_kl(value: float, options: AllOptions) -> float | None:
    return number(value, options) if options.is_given("ref.path") else None


def areal_kl_in(value: float, options: AllOptions) -> str | None:
    return "reward" if areal_kl(value, options) else None


def areal_kl_estimator(value: str, options: AllOptions) -> str | None:
    return value if areal_kl(0.0, options) is not None else None


def areal_reference(value: str, options: AllOptions) -> str | None:
    return None if value == options.get("actor.path") else value


def areal_weight_rule(value: str, options: AllOptions) -> str | None:
    if areal_algorithm(None, options) != "decoupled_ppo":
        return None
    section = "actor.rejection_sampling"
    names = ("level", "action", "metric")
    level, action, metric = (options.get(f"{section}.{name}") for name in names)
    if metric not in (None, "ratio"):
        raise NoCounterpart(f"weights are cut by their ratio, not by {metric!r}")
    masks = action in (None, "mask")
    if level == "sequence":
        if not masks:
            raise NoCounterpart("the weights of a sequence are masked, not clamped")
        return "mask_sequence"
    return "mask" if masks else "truncate"


def areal_lora_rank(value: Any, options: AllOptions) -> int | None:
    return int(options.get("actor.lora_rank") or 32) if options.get("actor.use_lora") else None


def areal_sink(value: str, options: AllOptions) -> str | None:
    wandb = options.get("stats_logger.wandb.mode") not in (None, "disabled")
    board = options.get("stats_logger.tensorboard.path")
    names = [name for name, used in (("wandb", wandb), ("tensorboard", board)) if used]
    return ",".join(names) or None


def areal_rewards(value: str, options: AllOptions) -> list[dict[str, Any]]:
    module, _, function = value.rpartition(".")
    return [{"verifier": value if ":" in value else f"{module}:{function}"}]


def areal_workflow(value: str, options: AllOptions) -> str:
    raise ByHand(f"{value!r} is of AReaL: write it as an agent, workflow.name = 'agent'")


CONVERSIONS: dict[str, Conversion] = {
    name: function
    for name, function in list(globals().items())
    if callable(function) and getattr(function, "__module__", "") == __name__ and name.islower()
} | {"float": number, "floats": numbers}
"""Conversions by name."""
