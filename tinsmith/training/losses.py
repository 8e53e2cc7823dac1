"""Losses: pure functions of the target log-probabilities, the datum's inputs and the loss's settings.

One each, by name in `LOSSES`.

Notation of the formulas: lp the log-probabilities that the model in training gives its targets, q those of the policy
that sampled them (input "logprobs"), A the input "advantages", r = exp(lp - q) the ratio of the two policies, sg what
no gradient flows through, and clip(r) = r held in [clip_low_threshold, clip_high_threshold], which are bounds of the
ratio itself. Sums go over the positions of one datum.

A function returns the loss of each position, of all datums of a row at once. Reductions are sums, never means, so that
however a batch is split its gradients stay the same. A position whose weight or advantage is 0 contributes exactly 0 to
value and gradient, also where lp is -inf; in dro and stable_reinforce these are the positions that do not count
(`_counted`, sequence_ratio_mask), such as those of prompts.

The formulas are those of the public documentation of the Tinker API ("Loss functions"). Only that of stable_reinforce
is Tinsmith's own.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith.errors import NotBuiltError, UserError
from tinsmith.kernels.device import upload
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.store.records import COMPARED


class DatumSpans:
    """Datums of given lengths, one behind the other: a sum over each is one operation, whatever their number.

    Datums are never told apart by a multiplication, so that a NaN stays in its own.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = list(lengths)
        self.device = device

    @cached_property
    def _counts(self) -> Tensor:
        return upload(np.array(self.lengths, dtype=np.int64), self.device)

    def sums(self, values: Tensor) -> Tensor:
        """Sum `values` [positions] of each datum to [datums], in float64 and without gradient."""
        # "unsafe": lengths are not read back from a GPU to be checked.
        total = torch.segment_reduce(values.detach().double(), "sum", lengths=self._counts, unsafe=True)
        return total.to(values.dtype)

    def spread(self, of_each: Tensor) -> Tensor:
        """Repeat `of_each` [datums] to [positions]."""
        return of_each.repeat_interleave(self._counts, output_size=sum(self.lengths))


Inputs = Mapping[str, Tensor]
"""loss_fn_inputs by name, in the shape of the logprobs: [positions, K], or [positions] for one target each."""

LossFunction = Callable[[Tensor, Inputs, Mapping[str, float], DatumSpans], Tensor]
"""(logprobs, inputs, settings by name, datums of the positions) -> loss of each position, shaped like logprobs."""


def cross_entropy(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float], spans: DatumSpans) -> Tensor:
    """-Σ weights · lp, with weights of any sign; for K targets a position, summed over them too.

    Source: "cross_entropy".
    """
    return -_times(inputs["weights"], logprobs)


def importance_sampling(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float], spans: DatumSpans) -> Tensor:
    """-Σ r · A. Source: "importance_sampling"."""
    return _surrogate(logprobs - inputs["logprobs"], inputs["advantages"])


def ppo(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float], spans: DatumSpans) -> Tensor:
    """-Σ min(r · A, clip(r) · A). Source: "ppo"; Schulman et al. 2017, arXiv:1707.06347, equation 7."""
    return _surrogate(_clipped(logprobs - inputs["logprobs"], inputs, config), inputs["advantages"])


def cispo(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float], spans: DatumSpans) -> Tensor:
    """-Σ sg(clip(r)) · A · lp. Source: "cispo"; MiniMax 2025, arXiv:2506.13585, equation 4."""
    low, high = _thresholds(logprobs, inputs, config)
    ratio = (logprobs.detach() - inputs["logprobs"]).exp()
    return -_times(ratio.clamp(low, high) * inputs["advantages"], logprobs)


def dro(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float], spans: DatumSpans) -> Tensor:
    """-Σ (lp · A - beta / 2 · (lp - q)²) over the positions that count.

    Source: "dro"; Richemond et al. 2024, arXiv:2405.19107.
    """
    counted, beta = _counted(inputs), config["beta"]
    advantages = torch.where(counted, inputs["advantages"], 0.0)
    drift = (logprobs - inputs["logprobs"]).masked_fill(~counted if beta else torch.ones_like(counted), 0.0)
    return 0.5 * beta * drift.square() - _times(advantages, logprobs)


def gspo(logprobs: Tensor, inputs: Inputs, config: Mapping[str, float], spans: DatumSpans) -> Tensor:
    """-Σ min(r_t · A, clip(r_t) · A), where r_t has the value of the sequence's ratio and its token's gradient.

        r_t = sg(s / exp(lp)) · exp(lp)
        s   = exp(mean of lp - q over the positions whose sequence_ratio_mask is not 0)

    Source: "gspo"; Zheng et al. 2025, arXiv:2507.18071, section 4.3 (GSPO-token).
    """
    counted = inputs["sequence_ratio_mask"] != 0
    drift = torch.where(counted, logprobs.detach() - inputs["logprobs"], 0.0)
    own = (logprobs - logprobs.detach()).masked_fill(logprobs.isinf(), 0.0)  # 0, and the gradient of lp
    mean = spans.spread(spans.sums(drift) / spans.sums(counted.to(drift.dtype)))
    return _surrogate(_clipped(mean + own, inputs, config), inputs["advantages"])


REPLAYED = "tinsmith_replay/tokens"
"""Metric of mixtures of experts: the share of a datum's tokens that recorded experts computed."""

MAX_RATIO = 2.0
"""Largest weight of a token."""

STOP = 1.5
"""Factor by which a token's probability may move in its advantage's direction before it no longer counts."""

MAX_DRIFT = 0.2
"""Largest root mean square of a sequence's log-ratios at full weight: about as far as ppo lets a ratio move."""

METRICS = ("tinsmith_stable_reinforce/weight", "tinsmith_stable_reinforce/limited", "tinsmith_stable_reinforce/drift")
"""Mean weight of the sampled tokens, share of them limited by `MAX_RATIO` or `STOP`, and drift."""

NOTICE = (
    "loss_fn stable_reinforce: this formula is Tinsmith's own, because Thinking Machines has not published theirs; "
    "docs/losses.md has it, and replies name it in their metrics (tinsmith_stable_reinforce)"
)


def stable_reinforce(
    logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float], spans: DatumSpans
) -> Tensor:
    """REINFORCE that stays stable when the policy that sampled is not the policy in training.

    The formula is Tinsmith's own; docs/losses.md has its reasons. With d = lp - q, and S the positions where
    sequence_ratio_mask is not 0,

        loss  = -Σ w · A · exp(lp - sg(lp)) + kl_coeff · Σ h(d)                       both sums over S
        w     = sg(trust · min(exp(d), MAX_RATIO)), but 0 where A > 0 and exp(d) > STOP, or A < 0 and exp(d) < 1 / STOP
        trust = min(1, MAX_DRIFT / drift),  drift = sqrt(mean over S of min(|d|, 1)²)
        h(d)  = d² / 2 up to |d| = 1, |d| - 1/2 beyond

    exp(lp - sg(lp)) is 1 and has the gradient of lp, so each token's gradient is that of REINFORCE times w, which lies
    in [0, MAX_RATIO].

    Where no bound is reached, value and gradient are those of importance_sampling. h is the Huber loss of d.
    """
    sampled = inputs["sequence_ratio_mask"] != 0
    gap, weights, _ = _weights(logprobs, inputs, sampled, spans)
    moving = (logprobs - logprobs.detach()).masked_fill(logprobs.isinf() | ~sampled, 0.0)  # 0, and the gradient of lp
    loss = -(weights * inputs["advantages"] * moving.exp())
    if config["kl_coeff"]:
        near = gap.clamp(-1.0, 1.0)  # the slope of h
        loss = loss + config["kl_coeff"] * (near * (gap - near / 2) + near * moving)
    return loss


def diagnose(logprobs: Tensor, inputs: Mapping[str, Tensor], spans: DatumSpans) -> Tensor:
    """Compute one number of each datum for each of `METRICS` [3, datums]."""
    sampled = inputs["sequence_ratio_mask"] != 0
    gap, weights, drift = _weights(logprobs, inputs, sampled, spans)
    count = spans.sums(sampled.to(gap.dtype))
    limited = (gap > math.log(MAX_RATIO)) | _has_moved(gap, inputs["advantages"])
    return torch.stack([spans.sums(weights) / count, spans.sums(limited.to(gap.dtype)) / count, drift])


def _weights(
    logprobs: Tensor, inputs: Mapping[str, Tensor], sampled: Tensor, spans: DatumSpans
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute gaps d and weights w [positions], 0 where nothing was sampled, and drifts [datums]; without gradients."""
    gap = torch.where(sampled, logprobs.detach() - inputs["logprobs"], 0.0)
    drift = (spans.sums(gap.clamp(-1.0, 1.0).square()) / spans.sums(sampled.to(gap.dtype))).sqrt()
    trust = spans.spread(torch.where(drift > MAX_DRIFT, MAX_DRIFT / drift, torch.ones_like(drift)))
    ratio = gap.clamp(max=math.log(MAX_RATIO)).exp()  # clamped before exp, which float32 could not hold
    return gap, torch.where(sampled & ~_has_moved(gap, inputs["advantages"]), trust * ratio, 0.0), drift


def _has_moved(gap: Tensor, advantages: Tensor) -> Tensor:
    """Which tokens have moved by the factor `STOP` the way that their advantage wants [N, bool]."""
    return gap * advantages.sign() > math.log(STOP)


def _counted(inputs: Inputs) -> Tensor:
    """Which positions were sampled (bool): those that the inputs "mask" and "weights" do not set to 0.

    Without both, all but those that look like the padding of a prompt: advantage and sampled log-probability exactly 0.
    """
    given = [inputs[name] != 0 for name in COUNTED_BY if name in inputs]
    if given:
        return torch.stack(given).all(dim=0)
    return (inputs["advantages"] != 0) | (inputs["logprobs"] != 0)


def _times(weights: Tensor, logprobs: Tensor) -> Tensor:
    """Weights · lp, and 0 where the weight is 0."""
    return torch.where(weights == 0, 0.0, weights * logprobs)


def _surrogate(log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """-exp(log_ratio) · A, and 0 where A is 0."""
    return -(log_ratio.masked_fill(advantages == 0, 0.0).exp() * advantages)


def _clipped(log_ratio: Tensor, inputs: Inputs, config: Mapping[str, float]) -> Tensor:
    """Log r', where min(r · A, clip(r) · A) = r' · A: r is bounded above where A > 0, below where A < 0.

    Clipped before exp: a ratio that float32 cannot hold would leave 0 · inf in the gradient.
    """
    low, high = _thresholds(log_ratio, inputs, config)
    return torch.where(inputs["advantages"] > 0, log_ratio.clamp(max=high.log()), log_ratio.clamp(min=low.log()))


def _thresholds(like: Tensor, inputs: Inputs, config: Mapping[str, float]) -> tuple[Tensor, Tensor]:
    """Lower and upper bound of the ratio at every position: the datum's own where it brings some, else the setting."""
    low, high = (inputs[name] if name in inputs else torch.full_like(like, config[name]) for name in CLIP_THRESHOLDS)
    return low, high


CLIP_THRESHOLDS = ("clip_low_threshold", "clip_high_threshold")
"""Settings of the losses that clip. As inputs of a datum they hold for each position and go before the settings."""

COUNTED_BY = ("mask", "weights")
"""Inputs of a dro datum that say which positions were sampled: 1 there, else 0."""


def _nonzero(name: str) -> Callable[[Inputs], Tensor]:
    return lambda inputs: inputs[name] != 0


@dataclass(frozen=True)
class Loss:
    """A loss with its settings."""

    function: LossFunction
    """Computes the loss of each position; the datum's loss is their sum."""
    inputs: tuple[str, ...]
    """loss_fn_inputs that it needs besides target_tokens, each of the shape of target_tokens."""
    trains: Callable[[Inputs], Tensor]
    """Positions that may have a gradient (bool, in the inputs' shape), by the inputs alone. Others get exactly 0."""
    config: Mapping[str, float] = field(default_factory=dict)
    """Its settings, all of them: in `LOSSES` the defaults."""
    optional_inputs: tuple[str, ...] = ()
    """loss_fn_inputs that it reads where a datum has them."""
    many_targets: bool = False
    needs_provenance: bool = False
    """Whether "logprobs" and "sequence_ratio_mask" are what was recorded at sampling, not the datum's."""
    metrics: tuple[str, ...] = ()
    """Names of the metrics that `diagnose` returns. A reply has the mean of each over its datums."""
    notice: str = ""
    """Line that is logged when the loss is first used."""

    @property
    def name(self) -> str:
        """Name that clients use."""
        return self.function.__name__

    @property
    def compares(self) -> bool:
        """Whether it compares with the log-probabilities of the policy that sampled the targets."""
        return "logprobs" in self.inputs

    @property
    def clips(self) -> bool:
        """Whether it holds the ratio between two thresholds."""
        return self.optional_inputs == CLIP_THRESHOLDS

    def compute(self, logprobs: Tensor, inputs: Inputs, spans: DatumSpans) -> Tensor:
        """Loss of each position from `logprobs` of the targets, in their shape; a datum's loss is the sum."""
        return self.function(logprobs, inputs, self.config, spans)

    def diagnose(self, logprobs: Tensor, inputs: Inputs, spans: DatumSpans) -> Tensor:
        """[metrics, datums] one number of each datum for each of `metrics`; arguments as of `compute`."""
        return diagnose(logprobs, inputs, spans) if self.metrics else logprobs.new_zeros(0, len(spans.lengths))


_POLICY = ("logprobs", "advantages")

LOSSES: Mapping[str, Loss] = {
    loss.name: loss
    for loss in (
        Loss(cross_entropy, ("weights",), _nonzero("weights"), many_targets=True),
        Loss(importance_sampling, _POLICY, _nonzero("advantages")),
        Loss(
            ppo,
            _POLICY,
            _nonzero("advantages"),
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
            CLIP_THRESHOLDS,
        ),
        Loss(
            cispo,
            _POLICY,
            _nonzero("advantages"),
            {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
            CLIP_THRESHOLDS,
        ),
        Loss(dro, _POLICY, _counted, {"beta": 0.05}, COUNTED_BY),
        Loss(
            gspo,
            (*_POLICY, "sequence_ratio_mask"),
            _nonzero("advantages"),
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
            CLIP_THRESHOLDS,
        ),
        Loss(
            stable_reinforce,
            (*_POLICY, "sequence_ratio_mask"),
            _nonzero("sequence_ratio_mask"),
            {"kl_coeff": 0.0},
            needs_provenance=True,
            metrics=METRICS,
            notice=NOTICE,
        ),
    )
}
"""Losses that clients can name, with default settings. Those of ppo and cispo are documented.

The hosted service's other defaults are not public: here dro has those of the documented example, gspo the bounds of
ppo, and kl_coeff is 0.
"""

NOT_BUILT = {
    "custom": (
        "losses are not uploaded here; pass the function itself to forward_backward_custom, "
        "and the SDK computes it in the client"
    ),
}
"""Losses of the Tinker API that are refused, and what to use instead."""


def find_loss(name: str, config: Mapping[str, float | str]) -> Loss:
    """The loss of that name with these settings, and defaults for the others.

    Raises NotBuiltError or UserError naming key and value.
    """
    if name in NOT_BUILT:
        raise NotBuiltError(f"loss_fn {name!r} is not built: {NOT_BUILT[name]}")
    if name not in LOSSES:
        raise UserError(f"loss_fn {name!r} is unknown; this version computes {', '.join(LOSSES)}")
    loss = LOSSES[name]
    settings = dict(loss.config)
    for key, value in config.items():
        if key not in settings:
            raise UserError(
                f"loss_fn_config key {key!r} is not one of {name}'s: {', '.join(settings) or 'it takes none'}"
            )
        settings[key] = _checked_setting(key, value)
    if loss.clips and settings["clip_low_threshold"] > settings["clip_high_threshold"]:
        bounds = ", ".join(f"{key}={settings[key]}" for key in CLIP_THRESHOLDS)
        raise UserError(
            f"loss_fn_config leaves no ratio between its bounds: {bounds}; the low one must not be above the high one"
        )
    return replace(loss, config=settings)


def _checked_setting(key: str, value: float | str) -> float:
    if isinstance(value, str) or not math.isfinite(value) or value < 0:
        raise UserError(f"loss_fn_config[{key!r}] is {value!r}; it must be a finite number, at least 0")
    return value


# The work and results of a pass, datum by datum, grouped by loss.


@dataclass(frozen=True, eq=False)
class DatumWork:
    """One datum of one model, checked and ready to compute."""

    model_id: str
    rendered: RenderedInput
    target_tokens: NDArray[np.int64]
    """[N] or [N, K], N the length of `rendered`."""
    loss: Loss
    loss_inputs: Mapping[str, NDArray[np.float32]]
    """Inputs of the loss besides target_tokens, each of their shape."""
    replayed: float | None = None
    """Share of the tokens whose experts are recorded ones; None where that is not asked."""


@dataclass(frozen=True, eq=False)
class DatumResult:
    """Result of a pass for one datum."""

    logprobs: NDArray[np.float32]
    """Log-probabilities of the target tokens, in their shape."""
    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the loss for the datum, by name."""
    compared: Mapping[str, float] = field(default_factory=dict)
    """The sums `COMPARED`, of a loss that compares with the policy that sampled."""


@dataclass(frozen=True, eq=False)
class Scored:
    """A group with what was computed of it."""

    group: "LossGroup"
    logprobs: Tensor
    """[positions, K] of their targets."""
    losses: Tensor
    """[positions, K] whose sum over the positions of a datum is its loss."""
    metrics: Tensor
    """[metrics of the loss, datums]"""


@dataclass(frozen=True, eq=False)
class LossGroup:
    """Datums with the same loss, K and kinds of inputs, one behind the other, still on the host."""

    loss: Loss
    places: list[int]
    """Indices of the datums in the row."""
    lengths: list[int]
    """Positions of each datum."""
    inputs: dict[str, NDArray[np.float32]]
    """[positions, K] each."""

    @classmethod
    def of(cls, work: Sequence[DatumWork], places: Sequence[int], width: int) -> list["LossGroup"]:
        """Group the datums at these places, which have `width` targets a position."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        for place in places:
            loss = work[place].loss
            alike.setdefault((loss.name, *sorted(loss.config.items()), *sorted(work[place].loss_inputs)), []).append(
                place
            )
        return [cls._of_alike([work[place] for place in own], own, width) for own in alike.values()]

    @classmethod
    def _of_alike(cls, datums: Sequence[DatumWork], places: list[int], width: int) -> "LossGroup":
        lengths = [len(datum.rendered) for datum in datums]
        inputs = {
            name: np.concatenate([datum.loss_inputs[name].reshape(len(datum.rendered), width) for datum in datums])
            for name in datums[0].loss_inputs
        }
        return cls(datums[0].loss, places, lengths, inputs)

    def computed(self, logprobs: Tensor) -> Scored:
        """Compute the losses of the group from its log-probabilities [positions, K]."""
        device = logprobs.device
        # Losses over sequences have one target a position
        shape = logprobs.shape if logprobs.shape[1] > 1 else logprobs.shape[:1]
        inputs = {name: upload(array, device).view(shape) for name, array in self.inputs.items()}
        spans = DatumSpans(self.lengths, device)
        flat = logprobs.view(shape)
        losses = self.loss.compute(flat, inputs, spans).view_as(logprobs)
        return Scored(self, logprobs, losses, self.loss.diagnose(flat.detach(), inputs, spans))

    def trained(self) -> NDArray[np.bool_]:
        """Which positions may have a gradient [positions, K]."""
        found: NDArray[np.bool_] = self.loss.trains(
            {name: torch.from_numpy(array) for name, array in self.inputs.items()}
        ).numpy()
        return found

    def compared(self, logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
        """Compute `COMPARED` of each datum [3, datums] from log-probabilities [positions, 1], on the host.

        Tokens count that were sampled, as far as the datum says so, else those with an advantage.
        """
        mask = self.inputs.get("sequence_ratio_mask")
        counted = self.trained() if mask is None else mask != 0
        moved = logprobs.astype(np.float64) - self.inputs["logprobs"]
        moved = np.where(counted, moved, 0.0).ravel()
        with np.errstate(over="ignore"):  # by what a client sends as the sampler's: then it is infinite
            summands = np.stack([counted.ravel(), -moved, np.expm1(moved) - moved])
        starts = np.cumsum([0, *self.lengths[:-1]])
        sums: NDArray[np.float64] = np.add.reduceat(summands, starts, axis=1)
        return sums


def trained_positions(groups: Sequence[LossGroup]) -> NDArray[np.bool_]:
    """The positions of neighbouring datums, all of these groups, that may have a gradient."""
    found: dict[int, NDArray[np.bool_]] = {}
    for group in groups:
        trained = group.trained().any(-1)  # [positions]
        found |= dict(zip(group.places, np.split(trained, np.cumsum(group.lengths)[:-1]), strict=True))
    return np.concatenate([found[place] for place in sorted(found)])


def results_of(
    group: LossGroup,
    work: Sequence[DatumWork],
    logprobs: NDArray[np.float32],
    losses: NDArray[np.float32],
    metrics: NDArray[np.float32],
) -> Iterator[DatumResult]:
    """Split the results of a group into those of its datums."""
    start = 0
    sums = dict(zip(COMPARED, group.compared(logprobs).tolist(), strict=True)) if group.loss.compares else {}
    for index, (place, of_datum) in enumerate(zip(group.places, metrics.T, strict=True)):
        datum = work[place]
        own = slice(start, start + len(datum.rendered))
        loss = float(losses[own].sum(dtype=np.float64))
        named = dict(zip(datum.loss.metrics, of_datum.tolist(), strict=True))
        if datum.replayed is not None:
            named[REPLAYED] = datum.replayed
        compared = {name: of_all[index] for name, of_all in sums.items()}
        yield DatumResult(logprobs[own].reshape(datum.target_tokens.shape), loss, named, compared)
        start = own.stop


def targets_per_position(datum: DatumWork) -> int:
    """The number K of targets of each position."""
    return datum.target_tokens.shape[1] if datum.target_tokens.ndim == 2 else 1
