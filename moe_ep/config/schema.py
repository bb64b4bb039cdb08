"""Every setting of a layer, of the example's model and of its training run: frozen, typed, checked when built.

Sections of a YAML file: `moe` (with `router`, `ep`, `fp8` inside), `model`, `train`. Values given in Python are strict
(`topk=2.0` is refused); the loader types the text of a file by these fields, so both ways share bounds and sentences.
Letters: T tokens, H hidden size, E experts, K experts per token, F ffn size, W ranks of the expert-parallel group.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError, model_validator
from typing_extensions import Self

from moe_ep.config import checks
from moe_ep.config.explain import explain
from moe_ep.config.problems import ConfigProblems, Problem
from moe_ep.topology import HopChoice

MAX_TOPK = 64  # contract: K <= 64 on every backend
MAX_INT = 2**31 - 1  # what counts and sizes are on the device

Count = Annotated[int, Strict(), Ge(1), Le(MAX_INT)]
CountOrZero = Annotated[int, Strict(), Ge(0), Le(MAX_INT)]
TopK = Annotated[int, Strict(), Ge(1), Le(MAX_TOPK)]
Positive = Annotated[float, Strict(), Gt(0)]
NotNegative = Annotated[float, Strict(), Ge(0)]
Fraction = Annotated[float, Strict(), Ge(0), Le(1)]
Decay = Annotated[float, Strict(), Ge(0), Lt(1)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict(), MinLen(1)]


class Section(BaseModel):
    """A frozen group of settings; a wrong value raises `ConfigError` with one sentence per setting."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    section: ClassVar[tuple[str, ...]] = ()  # where this section stands in a file

    if not TYPE_CHECKING:  # type checkers see the signature that pydantic derives from the fields

        def __init__(self, /, **values: object) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigProblems(explain(error, type(self), self.section, Config)) from None

    @classmethod
    def model_validate(cls, obj: object, **kwargs: Any) -> Self:
        """As pydantic's, for a map or an instance; raises `ConfigError` instead of pydantic's error."""
        try:
            return super().model_validate(obj, **kwargs)
        except ValidationError as error:
            raise ConfigProblems(explain(error, cls, cls.section, Config)) from None

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some settings changed; unlike pydantic's, the changed copy is checked (raises `ConfigError`)."""
        if not update:
            return super().model_copy(deep=deep)
        return type(self)(**{**{name: getattr(self, name) for name in type(self).model_fields}, **update})

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        problems = self.cross_problems()
        if problems:
            raise ConfigProblems(problems)
        return self

    def cross_problems(self) -> list[Problem]:
        """What is impossible about settings that are valid one by one."""
        return []


class RouterConfig(Section):
    """`moe.router`: which experts a token goes to and with which weight."""

    section = ("moe", "router")

    topk: TopK = Field(description="experts per token, K")
    score_function: Literal["softmax", "sigmoid"] = Field(default="softmax", description="how logits become scores")
    pre_softmax: Flag = Field(
        default=True, description="softmax over all experts (true) or only over the K chosen (false)"
    )
    normalize: Flag = Field(default=False, description="divide the K weights by their sum")
    scaling_factor: Positive = Field(default=1.0, description="factor on the weights, after normalising")
    num_groups: Count | None = Field(default=None, description="equal groups that the experts are split into")
    group_topk: Count | None = Field(default=None, description="groups that a token may use")
    group_score: Literal["top2", "max", "megatron"] = Field(default="top2", description="how a group is scored")
    expert_bias: Flag = Field(default=False, description="a per-expert bias, for choosing only, balances the load")
    bias_update_rate: NotNegative = Field(default=1e-3, description="step of the expert bias after each optimizer step")
    aux_loss_coef: NotNegative = Field(default=0.0, description="weight of the load-balancing loss per batch of a rank")
    seq_aux_loss_coef: NotNegative = Field(default=0.0, description="weight of the load-balancing loss per sequence")
    global_aux_loss_coef: NotNegative = Field(
        default=0.0, description="weight of the load-balancing loss over all EP ranks"
    )
    z_loss_coef: NotNegative = Field(default=0.0, description="weight of the squared log-sum-exp of the logits")
    batch_first: Flag = Field(default=True, description="inputs are [B, S, H] (true) or [S, B, H] (false)")
    capacity_factor: Positive | None = Field(
        default=None, description="rows per expert over an even share; null = dropless"
    )
    drop_policy: Literal["weight", "position"] = Field(
        default="weight", description="which tokens lose at full capacity"
    )

    def cross_problems(self) -> list[Problem]:
        return checks.router_problems(self)


class EPConfig(Section):
    """`moe.ep`: how the experts are spread over ranks and how rows travel.

    At size 1 nothing travels, so the options of the communication have no effect.
    """

    section = ("moe", "ep")

    size: Count | Literal["auto"] = Field(
        default="auto", description="ranks in the EP group; auto = all ranks of the group"
    )
    backend: Literal["auto", "torch", "intranode", "internode"] = Field(
        default="auto", description="what moves the rows"
    )
    ranks_per_node: Count | None = Field(
        default=None, description="ranks that make a node for the internode backend; null = those on one host"
    )
    hop: HopChoice = Field(default="auto", description="what carries rows between nodes for the internode backend")
    comm_sms: Count | None = Field(
        default=None, description="SM budget of the communication kernels; null = their default"
    )
    timeout_secs: Positive = Field(default=100.0, description="limit on every wait, seconds")
    alignment: Count = Field(default=1, description="rows per expert are padded to a multiple of this")
    exact: Flag = Field(default=False, description="sum a token's K rows in slot order, whatever the EP size")

    def cross_problems(self) -> list[Problem]:
        return checks.ep_problems(self)


class FP8Config(Section):
    """`moe.fp8`: experts in FP8. Whether this machine can is checked when a layer is built, not here.

    Router, shared expert, the sums of combine, gradients of weights and the optimizer stay in the layer's own dtype.
    """

    section = ("moe", "fp8")

    recipe: Literal["none", "blockwise", "current", "delayed", "mxfp8"] = Field(
        default="none", description="scaling recipe"
    )
    gemm: Literal["te", "cublas", "plain"] = Field(
        default="te",
        description="what multiplies: Transformer Engine, cuBLASLt without it (Hopper), or PyTorch after dequantising, "
        "on any device",
    )
    dispatch: Flag = Field(default=True, description="rows travel as FP8 with scales in the forward dispatch")
    grad_dispatch: Flag = Field(
        default=False, description="gradients travel as FP8 with scales in the backward of combine"
    )
    power_of_two_scales: Flag = Field(default=True, description="scales are rounded up to powers of two")
    wgrad: Literal["fp8", "bf16"] = Field(
        default="fp8", description="the product of the weights' gradients: in FP8, or kept in the dtype of the rows"
    )


class MoEConfig(Section):
    """`moe`: one Mixture-of-Experts layer."""

    section = ("moe",)

    hidden_size: Count = Field(description="width of a token, H")
    ffn_hidden_size: Count = Field(description="inner width of one routed expert, F")
    num_experts: Count = Field(description="routed experts over all ranks, E")
    activation: Literal["swiglu", "gelu"] = Field(default="swiglu", description="non-linearity of the experts")
    shared_ffn_hidden_size: Count | None = Field(
        default=None, description="inner width of the shared expert; null = none"
    )
    init_std: NotNegative = Field(default=0.02, description="standard deviation of the initial weights")
    router: RouterConfig
    ep: EPConfig = EPConfig()
    fp8: FP8Config = FP8Config()

    def cross_problems(self) -> list[Problem]:
        return checks.moe_problems(self, MAX_TOPK)


class ModelConfig(Section):
    """`model`: the transformer of the pretraining example around the MoE layers."""

    section = ("model",)

    vocab_size: Count = Field(default=256, description="tokens of the vocabulary; 256 = bytes")
    hidden_size: Count = Field(description="width of a token, equal to moe.hidden_size")
    num_layers: Count = Field(description="transformer layers")
    num_dense_layers: CountOrZero = Field(description="first layers that have an ordinary MLP instead of experts")
    num_heads: Count = Field(description="attention heads")
    dense_ffn_hidden_size: Count = Field(description="inner width of the MLP of a dense layer")
    max_seq_len: Count = Field(description="longest sequence, tokens")
    rope_theta: Positive = Field(default=10000.0, description="base of the rotary position angles")
    norm_eps: Positive = Field(default=1e-6, description="added to the mean square in RMSNorm")
    init_std: NotNegative = Field(default=0.02, description="standard deviation of the initial weights")

    def cross_problems(self) -> list[Problem]:
        return checks.model_problems(self)


class TrainConfig(Section):
    """`train`: the pretraining example's run. Batch sizes are in sequences, lengths in tokens."""

    section = ("train",)

    steps: Count = Field(description="optimizer steps")
    global_batch_size: Count = Field(description="sequences per step over all ranks")
    seq_len: Count = Field(description="tokens per sequence")
    micro_batch_size: Count | None = Field(default=None, description="sequences per pass of a rank; null = one pass")
    lr: Positive = Field(description="highest learning rate")
    min_lr_ratio: Fraction = Field(default=0.1, description="last learning rate over the highest")
    warmup_steps: CountOrZero = Field(default=0, description="steps in which the learning rate rises")
    weight_decay: NotNegative = Field(default=0.1, description="AdamW weight decay")
    beta1: Decay = Field(default=0.9, description="AdamW decay of the mean")
    beta2: Decay = Field(default=0.95, description="AdamW decay of the square")
    grad_clip: Positive = Field(default=1.0, description="largest norm of the whole gradient")
    seed: CountOrZero = Field(default=0, description="seed of the weights and of the data order")
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="where to run; auto = cuda if there is one"
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="compute type of the model")
    recompute: Flag = Field(default=False, description="recompute activations in the backward pass to save memory")
    eval_every: Count = Field(default=100, description="steps between evaluations")
    eval_batches: Count = Field(default=8, description="validation batches per evaluation")
    log_every: Count = Field(default=10, description="steps between lines of metrics")
    checkpoint_every: Count = Field(default=100, description="steps between checkpoints")
    run_dir: Text = Field(default="runs/pretrain", description="folder for metrics, plots and checkpoints")

    def cross_problems(self) -> list[Problem]:
        return checks.train_problems(self)


class Config(Section):
    """A whole file. A layer needs only `moe`; `model` and `train` are for the pretraining example."""

    moe: MoEConfig
    model: ModelConfig | None = None
    train: TrainConfig | None = None

    def cross_problems(self) -> list[Problem]:
        return checks.config_problems(self)
