"""The model of volumes: slices of many volumes together are the slices of each volume alone."""

import copy

import pytest
import torch
from torch import nn

from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.ct.aggregators import SliceLayout, make_aggregator, position_encoding
from lockstep_recipes.tasks.ct.backbone import SliceBackbone, make_backbone, set_trainable_modes
from lockstep_recipes.tasks.ct.losses import answer_loss
from lockstep_recipes.tasks.ct.options import AggregatorOptions
from tests.volume_cases import SIZE, VIT, backbone_options, make_batch, make_model, make_volumes

DINO = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 2, "patch_size": 8}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}


def loss_and_gradients(model, batch):
    logits = model(batch).logits
    loss = answer_loss(logits, batch["labels"], reduction="question")
    model.zero_grad()
    loss.backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("aggregator", ["transformer", "attention", "mean"])
def test_volumes_together_give_what_each_gives_alone(aggregator):
    model = make_model(aggregator)
    volumes = make_volumes(5, 1, 9, 2)
    logits, gradients = loss_and_gradients(model, make_batch(volumes))
    attention = model(make_batch(volumes)).attention.split([5, 1, 9, 2])
    sums = {}
    for number, volume in enumerate(volumes):
        alone, parts = loss_and_gradients(model, make_batch([volume]))
        assert torch.allclose(alone[0], logits[number], rtol=0, atol=1e-10)
        assert torch.allclose(model(make_batch([volume])).attention, attention[number], rtol=0, atol=1e-10)
        assert attention[number].sum().item() == pytest.approx(1)
        for name, gradient in parts.items():
            sums[name] = sums.get(name, 0) + gradient
    assert set(sums) == set(gradients)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, sums[name], rtol=0, atol=1e-10), name


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_chunks_change_nothing(chunk):
    batch = make_batch(make_volumes(5, 3))
    logits, gradients = loss_and_gradients(make_model(), batch)
    chunked, parts = loss_and_gradients(make_model(chunk=chunk), batch)
    assert torch.allclose(logits, chunked, rtol=0, atol=1e-10)
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, parts[name], rtol=0, atol=1e-10), name


def test_a_chunk_is_computed_again_with_the_same_dropout():
    model, batch = make_model(chunk=3, dropout=0.5), make_batch(make_volumes(5, 3))

    def by_parts():
        parts = [model._features(part) for part in batch["slices"].split(3)]
        return model(batch, torch.cat(parts)).logits

    results = []
    for forward in (lambda: model(batch).logits, by_parts):
        torch.manual_seed(3)
        model.zero_grad()
        forward().sum().backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


@pytest.mark.parametrize(
    ("architecture", "sizes"), [("vit", VIT), ("dinov2", DINO), ("resnet", RESNET), ("dinov2_with_registers", DINO)]
)
@pytest.mark.parametrize("pooling", [None, "mean"])
def test_every_parameter_of_a_backbone_gets_a_gradient(architecture, sizes, pooling):
    torch.manual_seed(0)
    backbone, _ = make_backbone(backbone_options(architecture, sizes, pooling=pooling))
    slices = torch.rand(2, 3, SIZE, SIZE)
    features = backbone(slices)
    assert features.shape == (2, backbone.width)
    features.square().sum().backward()
    assert [name for name, p in backbone.named_parameters() if p.requires_grad and p.grad is None] == []
    assert backbone.network(pixel_values=slices).last_hidden_state.shape[0] == 2


def test_the_feature_is_the_class_token_or_the_mean_of_the_patches():
    from transformers import ViTConfig, ViTModel

    network = ViTModel(ViTConfig(image_size=SIZE, **VIT), add_pooling_layer=False).eval()
    slices = torch.rand(2, 3, SIZE, SIZE)
    hidden = network(slices).last_hidden_state
    assert torch.equal(SliceBackbone(network)(slices), hidden[:, 0])
    assert torch.equal(SliceBackbone(network, "mean")(slices), hidden[:, 1:].mean(dim=1))
    larger = SliceBackbone(network)(torch.rand(1, 3, 2 * SIZE, 2 * SIZE))
    assert larger.shape == (1, 16)


def test_a_pretrained_backbone_comes_from_a_folder(tmp_path):
    torch.manual_seed(1)
    first, _ = make_backbone(backbone_options("dinov2", DINO))
    first.network.save_pretrained(tmp_path)
    second, missing = make_backbone(backbone_options(model=str(tmp_path)))
    assert missing == []
    slices = torch.rand(2, 3, SIZE, SIZE)
    assert torch.equal(first.eval()(slices), second.eval()(slices))


def test_what_does_not_suit_is_named():
    with pytest.raises(UsageError, match=r"no vision model of type 'vitt'\n.*did you mean vit"):
        make_backbone(backbone_options("vitt"))
    with pytest.raises(UsageError, match=r"takes images with 1 channels, but slices have 3"):
        make_backbone(backbone_options(sizes=VIT | {"num_channels": 1}))
    with pytest.raises(UsageError, match=r"ResNetModel has no class token"):
        make_backbone(backbone_options("resnet", RESNET, pooling="class_token"))
    with pytest.raises(UsageError, match=r"a width of 10 is not a multiple of 4 heads"):
        make_aggregator(AggregatorOptions(width=10, layers=1, heads=4), 8)


# ---- the aggregator


def test_attention_is_that_of_the_class_token_in_the_last_layer():
    model, batch = make_model(), make_batch(make_volumes(4))
    seen = []
    attend = nn.functional.scaled_dot_product_attention

    def watching(query, key, value, **options):
        seen.append((query.double() @ key.double().transpose(2, 3) / query.shape[-1] ** 0.5).softmax(-1))
        return attend(query, key, value, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", watching)
        weights = model(batch).attention
    expected = seen[-1][0, :, 0].mean(dim=0)[1:]
    assert torch.allclose(weights, expected / expected.sum(), atol=1e-12)


def test_the_result_depends_on_distances_in_millimetres_and_not_on_where_the_volume_begins():
    model = make_model()
    slices, positions, labels = make_volumes(6)[0]
    logits = model(make_batch([(slices, positions, labels)])).logits
    moved = model(make_batch([(slices, positions + 64, labels)])).logits
    assert torch.allclose(logits, moved, atol=1e-5)  # positions are float32
    spread = model(make_batch([(slices, 2 * positions, labels)])).logits
    assert (logits - spread).abs().max() > 1e-4
    mixed = torch.tensor([3, 0, 5, 1, 4, 2])
    ends = torch.tensor([0, 4, 2, 3, 1, 5])  # the middle is that of the first and the last slice
    assert mixed.sort().values.equal(ends.sort().values)
    other = model(make_batch([(slices[ends], positions[ends], labels)])).logits
    assert torch.allclose(logits, other, atol=1e-10)  # the order of the others says nothing: positions do


def test_the_encoding_of_positions():
    encoding = position_encoding(torch.tensor([0.0, 2.5], dtype=torch.float64), 8)
    rates = torch.tensor([1, 1e-1, 1e-2, 1e-3], dtype=torch.float64)
    assert torch.equal(encoding[0], torch.tensor([0.0] * 4 + [1.0] * 4, dtype=torch.float64))
    assert torch.allclose(encoding[1], torch.cat([(2.5 * rates).sin(), (2.5 * rates).cos()]))


def test_padding_and_its_inverse():
    layout = SliceLayout.of(torch.tensor([2, 1, 3]), 6, 3)
    padded = layout.pad(torch.arange(1.0, 7.0))
    assert padded.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert layout.unpad(padded).tolist() == [1, 2, 3, 4, 5, 6]


# ---- frozen parts


def test_frozen_parts_are_in_evaluation_mode_while_the_rest_trains():
    model = make_model(dropout=0.5, dtype=torch.float32)
    layers = model.backbone.network.layers
    model.backbone.requires_grad_(False)
    layers[1].requires_grad_(True)
    model.train()
    model(make_batch(make_volumes(2)))
    assert not any(module.training for module in layers[0].modules())
    assert all(module.training for module in layers[1].modules())
    assert not any(module.training for module in model.backbone.network.embeddings.modules())
    assert model.aggregator.training
    model.backbone.requires_grad_(True)
    model(make_batch(make_volumes(2)))
    assert all(module.training for module in model.backbone.modules())
    model.eval()
    model(make_batch(make_volumes(2)))
    assert not any(module.training for module in model.modules())
    set_trainable_modes(model.backbone, True)
    assert all(module.training for module in model.backbone.modules())


def test_a_frozen_backbone_builds_no_graph_and_its_features_do_not_depend_on_neighbours():
    model = make_model(dropout=0.5, dtype=torch.float32)
    model.backbone.requires_grad_(False)
    model.train()
    batch = make_batch(make_volumes(5, 2))
    features = model.slice_features(batch)
    assert not features.requires_grad
    for start, stop in ((0, 1), (3, 6), (2, 7)):
        assert torch.equal(model.slice_features({"slices": batch["slices"][start:stop]}), features[start:stop])
    model(batch).logits.sum().backward()
    assert all(p.grad is None for p in model.backbone.parameters())
    assert all(p.grad is not None for p in model.aggregator.parameters())


def test_ranks_with_fewer_chunks_run_chunks_of_zeros():
    batch = make_batch(make_volumes(3))
    logits, gradients = loss_and_gradients(make_model(chunk=2), batch)
    model = make_model(chunk=2)
    calls = []
    model.backbone.register_forward_pre_hook(lambda *_: calls.append(1))
    model.largest_over_ranks = lambda number: number + 2
    more, parts = loss_and_gradients(model, batch)
    assert len(calls) == 2 * 4 - 1  # each chunk but the last twice: the backward pass computes it again
    assert torch.allclose(logits, more, atol=1e-12)
    assert all(torch.allclose(gradients[name], parts[name], atol=1e-12) for name in gradients)


def test_a_copy_of_a_model_is_a_model():
    model, batch = make_model(), make_batch(make_volumes(2))
    assert torch.equal(copy.deepcopy(model)(batch).logits, model(batch).logits)
