"""Keys of the sections `optimizer` and `scheduler`."""

from __future__ import annotations

from hpcgen.planning.deepspeed.types import (
    SWITCH,
    Key,
    Section,
    choice,
    either,
    integer,
    list_of,
    number,
    switch,
    text,
)

LR = Key(number(at_least=0), auto=True)
BETAS = Key(list_of(number(at_least=0, below=1), length=2), auto=True)
EPS = Key(number(at_least=0), auto=True)
WEIGHT_DECAY = Key(number(at_least=0), auto=True)

_COMMON = {"lr": LR, "weight_decay": WEIGHT_DECAY}
_ADAM = {
    **_COMMON,
    "betas": BETAS,
    "eps": EPS,
    "bias_correction": SWITCH,
    "amsgrad": SWITCH,
    "adam_w_mode": SWITCH,
    "torch_adam": SWITCH,
    "fp32_optimizer_states": SWITCH,
    "set_grad_none": SWITCH,
    "foreach": Key(switch, nullable=True),
}
OPTIMIZER_PARAMS = {
    "adam": _ADAM,
    "adamw": _ADAM,
    "adagrad": {**_COMMON, "eps": EPS, "amsgrad": SWITCH, "fp32_optimizer_states": SWITCH},
    "lamb": {
        **_COMMON,
        "betas": BETAS,
        "eps": EPS,
        "bias_correction": SWITCH,
        "eps_inside_sqrt": SWITCH,
        "max_coeff": Key(number()),
        "min_coeff": Key(number()),
        "amsgrad": SWITCH,
    },
    "lion": {**_COMMON, "betas": BETAS, "set_grad_none": SWITCH, "fp32_optimizer_states": SWITCH},
    "muon": {
        **_ADAM,
        "momentum": Key(number(at_least=0)),
        "ns_method": Key(text),
        "muon_lr": Key(number(at_least=0)),
        "adam_lr": Key(number(at_least=0)),
        "per_head_muon": SWITCH,
    },
}
"""Type of the optimizer -> its parameters (runtime/engine.py, _configure_basic_optimizer, and ops/)."""
DEEPSPEED_OPTIMIZERS = (*OPTIMIZER_PARAMS, "muadam", "muadamw", "musgd")
"""Types that DeepSpeed recognizes in upper or lower case (runtime/config.py, DEEPSPEED_OPTIMIZERS). The last three are
those of the package mup."""
TORCH_OPTIMIZERS = (
    *(
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adamax",
        "LBFGS",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    ),
    "SparseAdam",
)
"""Classes of torch.optim for which DeepSpeed has no optimizer of its own. Their names are case-sensitive."""
REMOVED_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")
"""Optimizers of earlier versions (runtime/config.py of 0.17)."""

OPTIMIZER = Section(
    {
        "type": Key(text),
        "params": Section({}, "runtime/engine.py, _configure_basic_optimizer", open=True),
        "legacy_fusion": SWITCH,
    },
    "runtime/config.py, get_optimizer_name",
)

_RATES = Key(either(number(at_least=0), list_of(number(at_least=0))), auto=True)
_STEPS = Key(integer(at_least=1), auto=True)
_LAST = Key(integer(at_least=-1))
_WARMUP_TYPE = Key(choice("log", "linear"))
_WARMUP = {
    "warmup_min_lr": _RATES,
    "warmup_max_lr": Key(either(number(at_least=0), list_of(number(at_least=0))), auto=True, nullable=True),
    "warmup_num_steps": _STEPS,
    "warmup_type": _WARMUP_TYPE,
    "last_batch_iteration": _LAST,
}
_RATE = Key(either(number(), list_of(number())))
_WHOLE = Key(integer(at_least=0), nullable=True)
SCHEDULER_PARAMS = {
    "LRRangeTest": {
        "lr_range_test_min_lr": _RATE,
        "lr_range_test_step_size": Key(integer(at_least=1)),
        "lr_range_test_step_rate": Key(number()),
        "lr_range_test_staircase": SWITCH,
        "last_batch_iteration": _LAST,
    },
    "OneCycle": {
        "cycle_min_lr": _RATE,
        "cycle_max_lr": _RATE,
        "decay_lr_rate": Key(number()),
        "cycle_first_step_size": Key(integer(at_least=1)),
        "cycle_second_step_size": Key(integer(at_least=1), nullable=True),
        "cycle_first_stair_count": _WHOLE,
        "cycle_second_stair_count": _WHOLE,
        "decay_step_size": Key(integer(at_least=0)),
        "cycle_momentum": SWITCH,
        "cycle_min_mom": Key(number()),
        "cycle_max_mom": Key(number()),
        "decay_mom_rate": Key(number()),
        "last_batch_iteration": _LAST,
    },
    "WarmupLR": _WARMUP,
    "WarmupDecayLR": {**_WARMUP, "total_num_steps": _STEPS},
    "WarmupCosineLR": {
        "total_num_steps": _STEPS,
        "warmup_min_ratio": Key(number(at_least=0)),
        "warmup_num_steps": _STEPS,
        "cos_min_ratio": Key(number(at_least=0)),
        "warmup_type": _WARMUP_TYPE,
        "last_batch_iteration": _LAST,
    },
}
"""Type of the scheduler -> its parameters (runtime/lr_schedules.py)."""
REQUIRED_SCHEDULER_PARAMS = {
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "WarmupDecayLR": ("total_num_steps",),
    "WarmupCosineLR": ("total_num_steps",),
}
TORCH_SCHEDULERS = (
    *(
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "CyclicLR",
        "ExponentialLR",
        "LambdaLR",
    ),
    *("LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR", "StepLR"),
)
"""Classes of torch.optim.lr_scheduler that a configuration can describe (runtime/engine.py, _scheduler_from_config)."""

SCHEDULER = Section(
    {
        "type": Key(text),
        "params": Section({}, "runtime/engine.py, _scheduler_from_config", open=True),
    },
    "runtime/config.py, get_scheduler_name",
)
