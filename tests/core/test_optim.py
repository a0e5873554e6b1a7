import copy

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.configs import config_file
from lockstep.core import run_model
from lockstep.core.errors import UsageError
from lockstep.core.optim import OptimConfig, ParameterGroup, build_optimizer
from lockstep.core.schedule import Schedule, set_lr
from lockstep.parts.checks import optimizer_check
from lockstep.parts.model_summary import model_summary
from tests import own_tasks, runs
from tests.ranks import run_ranks


def make_model():
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 6))
    return nn.ModuleDict({"body": body, "head": nn.Linear(6, 3)}).double()


def build(model, name, lr, *, blocks=(), **keys):
    return build_optimizer(model, OptimConfig(name=name, lr=lr, **keys), blocks=blocks)


def forward(model, inputs):
    return model["head"](model["body"](inputs).tanh())


def names_in(model, optimizer):
    """Parameter names per group."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        group["name"]: [name_of[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups
    }


def train(model, optimizer, updates=6):
    for update in range(updates):
        inputs = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(update))
        optimizer.zero_grad(set_to_none=True)
        forward(model, inputs).square().sum().backward()
        optimizer.step()


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# ---- groups


def test_without_groups_all_parameters_are_in_the_default_group():
    model = make_model()
    assert names_in(model, build(model, "AdamW", 0.1)) == {"default": [name for name, _ in model.named_parameters()]}


def test_a_group_takes_what_its_patterns_match_and_the_default_takes_the_rest():
    model = make_model()
    found = names_in(
        model, build(model, "AdamW", 0.1, groups=[ParameterGroup(name="plain", match=["*.bias", "body.1.*"])])
    )
    assert set(found["plain"]) == {"body.0.bias", "body.1.weight", "body.1.bias", "body.2.bias", "head.bias"}
    assert set(found["default"]) == {"body.0.weight", "body.2.weight", "head.weight"}


def test_the_first_group_that_matches_takes_the_parameter():
    model = make_model()
    head, bias = ParameterGroup(name="head", match=["head.*"]), ParameterGroup(name="bias", match=["*bias"])
    found = names_in(model, build(model, "AdamW", 0.1, groups=[head, bias]))
    assert "head.bias" in found["head"]
    assert "head.bias" not in found["bias"]
    turned = names_in(model, build(model, "AdamW", 0.1, groups=[bias, head]))
    assert "head.bias" in turned["bias"]
    assert turned["head"] == ["head.weight"]


def test_every_parameter_is_in_exactly_one_group():
    model = make_model()
    groups = [
        ParameterGroup(name="a", match=["body.?.weight"]),
        ParameterGroup(name="b", match=["*weight"]),
        ParameterGroup(name="c", match=["body*"]),
    ]
    optimizer = build(model, "AdamW", 0.1, groups=groups)
    members = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert len(members) == len({id(member) for member in members})
    assert {id(member) for member in members} == {id(parameter) for parameter in model.parameters()}


def test_groups_that_take_everything_leave_no_empty_default():
    model = make_model()
    optimizer = build(model, "AdamW", 0.1, groups=[ParameterGroup(name="all", match=["*"])])
    assert [group["name"] for group in optimizer.param_groups] == ["all"]


def test_patterns_match_whole_names_and_case():
    model = make_model()
    for pattern in ("head", "ead.*", "HEAD.*", "body.0"):
        with pytest.raises(UsageError):
            build(model, "AdamW", 0.1, groups=[ParameterGroup(name="head", match=[pattern])])


def test_frozen_parameters_are_in_their_group_and_stay_as_they_are_until_thawed():
    model = make_model()
    model["body"].requires_grad_(False)
    optimizer = build(model, "AdamW", 0.1, weight_decay=0.5, groups=[ParameterGroup(name="body", match=["body.*"])])
    assert len(names_in(model, optimizer)["body"]) == 6
    before = copy.deepcopy(model)
    train(model, optimizer)
    assert same_weights(model["body"], before["body"])
    assert not same_weights(model["head"], before["head"])
    model["body"].requires_grad_(True)
    train(model, optimizer)
    assert not same_weights(model["body"], before["body"])


def test_shared_parameters_are_optimized_once():
    shared = nn.Linear(3, 3)
    optimizer = build(nn.Sequential(shared, shared), "SGD", 0.1, groups=[ParameterGroup(name="first", match=["0.*"])])
    assert [len(group["params"]) for group in optimizer.param_groups] == [2]


def test_a_tied_parameter_goes_by_all_its_names():
    """Under its second name it had the default rate, silently."""
    for name in ("0.weight", "1.weight", "1.*"):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        optimizer = build(model, "SGD", 0.1, groups=[ParameterGroup(name="own", match=[name], lr=0.5)])
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        assert rates[id(model[0].weight)] == 0.5, name
        assert rates[id(model[0].bias)] == 0.1, name
        assert sum(len(group["params"]) for group in optimizer.param_groups) == 3, name
    bodies = [ParameterGroup(name="first", match=["1.*"]), ParameterGroup(name="second", match=["0.*"])]
    assert [len(group["params"]) for group in build(model, "SGD", 0.1, groups=bodies).param_groups] == [2, 1]


class TiedEnds(own_tasks.Plain):
    """The last layer has the weights of the first, and its own name for them."""

    def model(self):
        model = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 10), nn.Linear(10, 5)).double()
        model[2].weight = model[0].weight
        return model


def fit_tied(config):
    return runs.fit(TiedEnds(), config)[0]


def test_tied_weights_train_with_the_rate_of_their_second_name_as_in_plain_torch():
    torch.manual_seed(0)
    task = TiedEnds()
    model, data = task.model(), task.train_data().tensors
    rest = [parameter for name, parameter in model.named_parameters() if name != "0.weight"]
    optimizer = torch.optim.SGD([{"params": [model[2].weight], "lr": 0.5}, {"params": rest, "lr": 0.1}])
    for step in range(4):
        chosen = torch.from_numpy(runs.permute(np.arange(step * 24, step * 24 + 24), 240, 0, 0))
        optimizer.zero_grad()
        (task.loss(model, [tensor[chosen] for tensor in data]) / 24).backward()
        optimizer.step()
    groups = [{"name": "tied", "match": ["2.weight"], "lr": 0.5}]
    for world, strategy in ((1, "single"), (2, "ddp"), (2, "fsdp")):
        config = runs.config(train={"steps": 4}, parallel={"strategy": strategy})
        config["optim"] = {"name": "SGD", "lr": 0.1, "groups": groups}
        for weights in run_ranks(world, fit_tied, config):
            assert runs.difference(weights, model.state_dict()) < 1e-10, strategy


# ---- rates and decay


def test_groups_have_their_own_rate_and_decay_and_else_the_common_ones():
    groups = [
        ParameterGroup(name="both", match=["body.0.*"], lr=0.01, weight_decay=0.3),
        ParameterGroup(name="rate", match=["body.1.*"], lr=0.02),
        ParameterGroup(name="decay", match=["body.2.*"], weight_decay=0.0),
        ParameterGroup(name="none", match=["head.weight"]),
    ]
    optimizer = build(make_model(), "AdamW", 0.1, weight_decay=0.05, groups=groups)
    found = {group["name"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert found == {
        "both": (0.01, 0.3),
        "rate": (0.02, 0.05),
        "decay": (0.1, 0.0),
        "none": (0.1, 0.05),
        "default": (0.1, 0.05),
    }


def test_every_group_keeps_its_base_rate():
    optimizer = build(make_model(), "SGD", 0.1, groups=[ParameterGroup(name="head", match=["head.*"], lr=0.7)])
    assert {group["name"]: group["base_lr"] for group in optimizer.param_groups} == {"head": 0.7, "default": 0.1}


@pytest.mark.parametrize(("name", "decay"), [("AdamW", 0.01), ("SGD", 0), ("Adagrad", 0), ("RMSprop", 0)])
def test_without_a_decay_torchs_own_default_holds(name, decay):
    assert build(make_model(), name, 0.1).param_groups[0]["weight_decay"] == decay


def test_a_decay_of_zero_is_not_the_default():
    assert build(make_model(), "AdamW", 0.1, weight_decay=0.0).param_groups[0]["weight_decay"] == 0.0


# ---- any optimizer of torch


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("AdamW", {}),
        ("AdamW", {"betas": (0.8, 0.95), "eps": 1e-6, "amsgrad": True}),
        ("Adam", {}),
        ("SGD", {"momentum": 0.9, "nesterov": True}),
        ("Adagrad", {"lr_decay": 0.1}),
        ("RMSprop", {"alpha": 0.9, "momentum": 0.5}),
        ("NAdam", {}),
    ],
)
def test_the_optimizer_is_torchs_own_to_the_last_bit(name, args):
    mine, plain = make_model(), make_model()
    optimizer = build(
        mine,
        name,
        0.02,
        weight_decay=0.1,
        groups=[ParameterGroup(name="head", match=["head.*"], lr=0.005, weight_decay=0.0)],
        args=args,
    )
    kind = getattr(torch.optim, name)
    rest, head = list(plain["body"].parameters()), list(plain["head"].parameters())
    reference = kind(
        [{"params": head, "lr": 0.005, "weight_decay": 0.0}, {"params": rest}], lr=0.02, weight_decay=0.1, **args
    )
    assert type(optimizer) is kind
    before = copy.deepcopy(mine)
    train(mine, optimizer)
    train(plain, reference)
    assert same_weights(mine, plain)
    assert not same_weights(mine, before)


# ---- set_lr


# ---- layer decay


def make_deep():
    torch.manual_seed(0)
    return nn.ModuleDict(
        {
            "embed": nn.Linear(4, 4),
            "layers": nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]),
            "head": nn.Linear(4, 2),
        }
    )


BLOCKS = ["layers.0", "layers.1", "layers.2"]


def rates(model, optimizer):
    """Learning rate by parameter name."""
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name_of[id(parameter)]: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}


def test_layer_decay_gives_each_level_below_the_top_a_lower_rate():
    model = make_deep()
    found = rates(model, build(model, "AdamW", 1.0, layer_decay=0.5, blocks=BLOCKS))
    wanted = {"embed": 0.0625, "layers.0": 0.125, "layers.1": 0.25, "layers.2": 0.5, "head": 1.0}
    assert found == {name: wanted[name.rpartition(".")[0]] for name, _ in model.named_parameters()}


def test_the_head_of_the_log_says_where_learning_rates_differ():
    model = make_deep()
    summary = model_summary(model, build(model, "AdamW", 1.0, layer_decay=0.5, blocks=BLOCKS))
    assert "  learning rates differ: 5 groups, from 0.0625 (default/level-0) to 1 (default/level-4)" in summary
    assert not [line for line in model_summary(model, build(model, "AdamW", 1.0)) if "differ" in line]
    model.embed.requires_grad_(False)
    summary = model_summary(model, build(model, "AdamW", 1.0, layer_decay=0.5, blocks=BLOCKS))
    assert "  learning rates differ: 4 groups, from 0.125 (default/level-1) to 1 (default/level-4)" in summary


def test_layer_decay_divides_groups_but_not_those_with_a_rate_of_their_own():
    model = make_deep()
    groups = [
        ParameterGroup(name="biases", match=["*.bias"], weight_decay=0.0),
        ParameterGroup(name="head", match=["head.*"], lr=7.0),
    ]
    optimizer = build(model, "AdamW", 1.0, weight_decay=0.1, groups=groups, layer_decay=0.5, blocks=BLOCKS)
    found = rates(model, optimizer)
    assert (found["head.weight"], found["head.bias"], found["embed.bias"], found["layers.2.weight"]) == (
        7.0,
        1.0,
        0.0625,
        0.5,
    )
    decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays["biases/level-0"] == 0.0
    assert decays["default/level-0"] == 0.1
    assert all(group["base_lr"] == group["lr"] for group in optimizer.param_groups)


def test_layer_decay_of_one_trains_as_without_it():
    one, other = make_deep(), make_deep()
    for model, options in ((one, {}), (other, {"layer_decay": 1.0, "blocks": BLOCKS})):
        optimizer = build(model, "AdamW", 0.1, weight_decay=0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            inputs = torch.ones(2, 4)
            for layer in (model["embed"], *model["layers"], model["head"]):
                inputs = layer(inputs).tanh()
            inputs.square().sum().backward()
            optimizer.step()
    assert same_weights(one, other)


def test_layer_decay_without_blocks_is_refused():
    with pytest.raises(UsageError, match="no repeated blocks"):
        build(make_deep(), "AdamW", 1.0, layer_decay=0.9)


def test_set_lr_gives_every_group_its_base_rate_times_the_factor_however_often():
    optimizer = build(make_model(), "SGD", 0.1, groups=[ParameterGroup(name="head", match=["head.*"], lr=0.8)])
    for factor in (0.5, 0.25, 0.0, 2.0):
        set_lr(optimizer, factor)
        assert {group["name"]: group["lr"] for group in optimizer.param_groups} == {
            "head": 0.8 * factor,
            "default": 0.1 * factor,
        }
    assert {group["base_lr"] for group in optimizer.param_groups} == {0.1, 0.8}


def test_a_schedule_drives_the_groups_as_torchs_lambda_lr_does():
    model = make_model()
    groups = [ParameterGroup(name="head", match=["head.*"], lr=0.8)]
    mine, plain = build(model, "SGD", 0.1, groups=groups), build(model, "SGD", 0.1, groups=groups)
    schedule = Schedule(name="cosine", total=20, warmup_steps=3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(plain, schedule)
    for update in range(20):
        set_lr(mine, schedule(update))
        assert [group["lr"] for group in mine.param_groups] == [group["lr"] for group in plain.param_groups]
        plain.step()
        scheduler.step()


# ---- what is refused


def refusal(*args, **options):
    with pytest.raises(UsageError) as caught:
        build(make_model(), *args, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("AdamWW", "AdamW"),
        ("Adagard", "Adagrad"),
        ("RMSProp", "RMSprop"),
        ("adamw", "AdamW"),
        ("sgd", "SGD"),
        ("adam", "Adam"),
    ],
)
def test_an_unknown_optimizer_is_refused_with_the_nearest_one(wrong, right):
    assert f"did you mean {right}?" in refusal(wrong, 0.1)


def test_an_unknown_optimizer_is_refused_with_all_there_are():
    text = refusal("Quux", 0.1)
    assert "'Quux'" in text
    assert "optim.name" in text
    assert "did you mean" not in text
    for name in ("AdamW", "SGD", "Adagrad", "RMSprop", "Muon"):
        assert name in text


def test_names_of_torch_optim_that_are_no_optimizers_are_refused():
    for name in ("Optimizer", "lr_scheduler", "__doc__"):
        assert f"no {name!r}" in refusal(name, 0.1)


def test_an_unknown_argument_is_refused_with_those_it_takes():
    text = refusal("SGD", 0.1, args={"momentun": 0.9})
    assert "'momentun'" in text
    assert "optim.args.momentun" in text
    for name in ("momentum", "dampening", "nesterov"):
        assert name in text


def test_parameters_are_no_argument():
    assert "'params'" in refusal("SGD", 0.1, args={"params": []})


def test_a_decay_that_the_optimizer_does_not_take_is_refused():
    assert "'weight_decay'" in refusal("Rprop", 0.1, weight_decay=0.1)


def test_a_decay_of_a_group_that_the_optimizer_does_not_take_is_refused():
    assert "weight_decay" in refusal(
        "Rprop", 0.1, groups=[ParameterGroup(name="head", match=["head.*"], weight_decay=0.1)]
    )


def test_a_rate_among_the_arguments_is_refused():
    text = refusal("SGD", 0.1, args={"lr": 0.5})
    assert "optim.args.lr: lr has its own key" in text
    assert "set optim.lr" in text


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("AdamW", {"betas": (2.0, 0.9)}),
        ("AdamW", {"betas": 3}),
        ("AdamW", {"betas": [0.9]}),
        ("AdamW", {"foreach": True, "fused": True}),
        ("SGD", {"momentum": "high"}),
        ("SGD", {"nesterov": True}),
    ],
)
def test_a_bad_value_of_an_argument_is_refused(name, args):
    assert f"optim.args of {name}" in refusal(name, 0.1, args=args)


@pytest.mark.parametrize(
    ("name", "dtype", "options", "where"),
    [
        ("AdamW", torch.float32, {"args": {"capturable": True}}, "optim.args.capturable=true: AdamW cannot update"),
        ("RMSprop", torch.float64, {"args": {"capturable": True}}, "optim.args.capturable=true: RMSprop"),
        ("SGD", torch.float32, {"args": {"differentiable": True}}, "optim.args.differentiable=true: SGD"),
        ("SGD", torch.complex64, {"fused": True}, "optim.fused=true: SGD cannot update parameters of complex64 on cpu"),
        ("Adafactor", torch.complex64, {}, "optim: Adafactor cannot update parameters of complex64"),
        ("AdamW", torch.float32, {"fused": False, "args": {"fused": True}}, "optim.args.fused: optim.fused=false and"),
    ],
)
def test_an_option_that_torch_refuses_only_in_an_update_is_refused_before(name, dtype, options, where):
    model = nn.Linear(3, 2, dtype=dtype)
    with pytest.raises(UsageError) as caught:
        optimizer_check.check(build(model, name, 0.1, **options), model)
    assert where in str(caught.value)
    assert caught.value.remedy


def test_a_training_with_such_an_option_ends_before_its_first_step(tmp_path):
    settings = runs.config(optim={"args": {"capturable": True}})
    with pytest.raises(UsageError, match=r"optim\.args\.capturable=true"):
        runs.fit(own_tasks.Plain(), settings, tmp_path / "run")


@pytest.mark.parametrize("args", [{"foreach": True}, {"maximize": True}, {"fused": True}, {"amsgrad": True}])
def test_options_that_work_pass_and_the_trial_leaves_no_trace(args):
    model = make_model()
    optimizer = build(model, "Adam", 0.1, args=args)
    before = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    optimizer_check.check(optimizer, model)
    assert not optimizer.state
    assert all(torch.equal(before[0][name], value) for name, value in model.state_dict().items())
    assert torch.equal(before[1], torch.get_rng_state())


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_fused_kernel_takes_gradients_and_parameters_in_their_strides(name):
    trained = []
    for fused in (True, False):
        model = nn.ParameterList([torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4).t()])
        config = OptimConfig(name=name, lr=0.1, fused=fused)
        optimizer = run_model.make_optimizer(runs_config(config), own_tasks.Plain(), model)
        for parameter in model:
            parameter.grad = torch.arange(12.0).reshape(parameter.shape[::-1]).t()
        optimizer.step()
        trained.append([parameter.detach() for parameter in model])
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other)


def test_a_parameter_with_gaps_in_memory_is_refused_by_a_fused_kernel():
    model = nn.ParameterList([torch.zeros(4, 4)[:, :2]])
    with pytest.raises(UsageError, match=r"optim\.fused: .*gaps in memory"):
        run_model.make_optimizer(runs_config(OptimConfig(fused=True)), own_tasks.Plain(), model)


def runs_config(optim):
    return config_file.parse(runs.config(), needs_task=False).model_copy(update={"optim": optim})


def test_a_group_that_matches_nothing_is_refused_with_names_there_are():
    text = refusal(
        "SGD",
        0.1,
        groups=[
            ParameterGroup(name="head", match=["head.*"]),
            ParameterGroup(name="encoder", match=["encoder.*", "enc?"]),
        ],
    )
    assert "'encoder.*'" in text
    assert "'enc?'" in text
    assert "group 'encoder'" in text
    assert "body.0.weight" in text


def test_a_group_left_empty_by_those_before_it_is_refused():
    assert "group 'bias'" in refusal(
        "SGD", 0.1, groups=[ParameterGroup(name="all", match=["*"]), ParameterGroup(name="bias", match=["*.bias"])]
    )
