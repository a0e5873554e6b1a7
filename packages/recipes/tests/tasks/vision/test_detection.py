"""The detection task with the small detector: losses, boxes, mean average precision, ranks."""

import contextlib
import io
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep import LockstepError, Trainer
from lockstep_recipes.tasks.vision.detection import center_losses as center_losses_module
from lockstep_recipes.tasks.vision.detection import matching, overlap, views
from lockstep_recipes.tasks.vision.detection.center_detector import (
    CenterDetector,
    CenterOutput,
    best_boxes,
    boxes_of,
    group_norm,
)
from lockstep_recipes.tasks.vision.detection.center_losses import center_losses, center_targets
from lockstep_recipes.tasks.vision.detection.coco_map import among_best
from lockstep_recipes.tasks.vision.detection.models import Detections, Targets
from lockstep_recipes.tasks.vision.detection.options import DetectionOptions
from lockstep_recipes.tasks.vision.images.annotated import AnnotatedImage
from packages.recipes.tests.tasks.vision.readers.test_boxed_images import yolo
from tests import runs
from tests.box_cases import CATEGORIES, COUNTS, box_folder, fit, fit_and_die, fit_to_the_end, make_task, results_of
from tests.ranks import RankFailed, run_ranks
from tests.selection import mainly


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return box_folder(tmp_path_factory.mktemp("boxes"))


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    return box_folder(tmp_path_factory.mktemp("boxes"), counts=(3, 0, 7, 1, 0, 2, 12), seed=1, split="val")


def prepared(task, index, training=True):
    torch.manual_seed(index)
    return task.prepare(task.train_data()[index], 0, training)


def batch_of(task, indices, training=True):
    return task.collate([prepared(task, index, training) for index in indices])


def targets_of(boxes, labels, counts, ignored=(), size=64):
    regions = torch.tensor(ignored, dtype=torch.float32).reshape(-1, 4)
    return Targets(
        boxes=torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        labels=torch.tensor(labels, dtype=torch.int64),
        counts=torch.tensor(counts),
        ignored=regions,
        ignored_counts=torch.tensor([len(regions)] + [0] * (len(counts) - 1)),
        shapes=torch.full((len(counts), 2), size),
    )


# ---- overlap and suppression


def random_boxes(count, seed, side=100.0):
    draw = torch.Generator().manual_seed(seed)
    corner = torch.rand(count, 2, generator=draw) * side
    return torch.cat([corner, corner + 1 + torch.rand(count, 2, generator=draw) * side / 2], 1)


def naive_overlap(one, other):
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    both = max(0.0, wide) * max(0.0, high)
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (one, other)]
    return both / (sum(areas) - both)


@pytest.mark.cases("0.2-4", "0.5-4")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most", [0.2, 0.5, 1.0])
def test_suppression_is_the_greedy_choice(seed, most):
    boxes, labels = random_boxes(60, seed), torch.randint(0, 2, (60,), generator=torch.Generator().manual_seed(seed))
    kept = []
    for number in range(60):
        rivals = [other for other in kept if labels[other] == labels[number]]
        if all(naive_overlap(boxes[other].tolist(), boxes[number].tolist()) <= most for other in rivals):
            kept.append(number)
    both = overlap.suppressed(torch.stack([boxes, boxes]), torch.stack([labels, labels]), most)
    assert (~both[0]).nonzero().flatten().tolist() == kept
    assert torch.equal(both[0], both[1])


@pytest.mark.parametrize("count", [None, 7, 300])
def test_suppression_in_blocks_is_the_greedy_choice(monkeypatch, count):
    monkeypatch.setattr(overlap, "_BLOCK", 16)
    boxes = random_boxes(150, seed=3)
    labels = torch.randint(0, 2, (150,), generator=torch.Generator().manual_seed(1))
    wanted = (~overlap._suppressed_at_once(boxes, labels, 0.3)).nonzero().squeeze(1)
    assert overlap.remaining(boxes, labels, 0.3, count=count).equal(wanted[:count])
    both = overlap.suppressed(torch.stack([boxes, boxes.flip(0)]), torch.stack([labels, labels.flip(0)]), 0.3)
    assert (~both[0]).nonzero().squeeze(1).equal(wanted)
    assert both[1].equal(overlap._suppressed_at_once(boxes.flip(0), labels.flip(0), 0.3))
    assert overlap.remaining(boxes, labels, 1.0, count=count).equal(torch.arange(150)[:count])
    assert overlap.remaining(boxes[:0], labels[:0], 0.3, count=count).tolist() == []


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            self.largest = max(self.largest, made.nbytes)
        return made


def test_boxes_of_many_tiles_need_little_memory():
    corners = 20.0 * torch.cartesian_prod(torch.arange(100.0), torch.arange(100.0))
    boxes = torch.cat([corners, corners + 15], dim=1).repeat(2, 1)  # 20,000 boxes, each of them twice
    labels = torch.zeros(len(boxes), dtype=torch.int64)
    with LargestTensor() as made:
        kept = overlap.remaining(boxes, labels, 0.6, count=2000)
    assert kept.equal(torch.arange(2000))
    assert made.largest < 4e6
    with LargestTensor() as made:
        gone = overlap.suppressed(boxes[9000:11000], labels[9000:11000], 0.6)
    assert not gone.any()
    assert made.largest < 4e6


def test_generalised_overlap_of_known_boxes():
    same, beside = torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([[2.0, 0, 4, 2]])
    apart = torch.tensor([[4.0, 0, 6, 2]])
    values = [float(overlap.generalised_overlap(same, other)) for other in (same, beside, apart)]
    assert values == pytest.approx([1.0, 0.0, -1 / 3])  # apart: a third of the box around both is empty


@pytest.mark.parametrize("seed", range(4))
def test_the_best_of_each_picture_and_class_are_kept(seed):
    draw = torch.Generator().manual_seed(seed)
    scores = torch.randint(0, 9, (3, 50), generator=draw) / 8  # many are equal
    labels = torch.randint(-1, 3, (3, 50), generator=draw)
    kept = among_best(scores, labels, most=5)
    for row in range(3):
        for label in range(3):
            places = [place for place in range(50) if labels[row, place] == label]
            best = sorted(places, key=lambda place: -scores[row, place])[:5]  # stable
            assert sorted(best) == [place for place in places if kept[row, place]]
    assert not kept[labels < 0].any()


# ---- the detector


def test_the_detector_takes_any_size_and_says_how_it_is_arranged():
    model = CenterDetector(3, 4, width=16, norm=group_norm)
    output = model(torch.randn(2, 3, 61, 90))
    assert (output.logits.shape, output.distances.shape) == ((2, 4, 16, 23), (2, 4, 16, 23))
    assert output.logits.sigmoid().mean().item() == pytest.approx(0.01, abs=0.005)


def test_a_box_that_the_output_says_is_found():
    logits, distances = torch.full((1, 2, 16, 16), -9.0), torch.full((1, 4, 16, 16), 3.0)
    logits[0, 1, 5, 7] = 4.0  # the middle of this place is (30, 22)
    distances[0, :, 5, 7] = torch.tensor([10.0, 5.0, 20.0, 60.0])
    boxes, scores, labels = best_boxes(CenterOutput(logits, distances), size=(64, 64), most=10, overlap=0.6)
    assert boxes[0, 0].tolist() == [20.0, 17.0, 50.0, 64.0]  # clipped at the bottom
    assert labels[0, 0] == 1
    assert float(scores[0, 0]) == pytest.approx(torch.tensor(4.0).sigmoid().item())
    assert (scores[0, 1:] < 0.001).all()


def test_targets_of_boxes():
    """A large box, and a small one inside of it."""
    targets = targets_of([[0, 0, 64, 64], [30, 22, 42, 34]], [0, 1], [2])
    wanted = center_targets(targets, classes=2, rows=16, columns=16, like=torch.zeros(1))
    assert (wanted.heat.flatten(2).argmax(-1) == torch.tensor([8 * 16 + 8, 7 * 16 + 9])).all()
    assert [int((heat == 1).sum()) for heat in wanted.heat[0]] == [1, 1]
    assert set(wanted.owner.flatten().tolist()) == {0, 1, 2}
    assert wanted.owner[0, 7, 9] == 1  # the smaller box has it
    assert wanted.owner[0, 0, 0] == 2  # the Gaussians do not reach the corner: there is no box
    assert (wanted.share[wanted.owner == 2] == 0).all()
    shares = torch.zeros(3).index_add_(0, wanted.owner.flatten(), wanted.share.flatten())
    assert torch.allclose(shares, torch.tensor([1.0, 1.0, 0.0]))


def random_targets(seed=0, pictures=5, size=64):
    """Random boxes and ignored regions, very unevenly spread over images. Some have no box."""
    draw = torch.Generator().manual_seed(seed)
    counts, ignored = (torch.tensor([0, 9, 1, 0, 4][:pictures]), torch.tensor([1, 0, 0, 3, 0][:pictures]))
    boxes, regions = (random_boxes(int(part.sum()), seed + 1, side=size * 0.7) for part in (counts, ignored))
    return Targets(
        boxes=boxes,
        labels=torch.randint(0, 3, (len(boxes),), generator=draw),
        counts=counts,
        ignored=regions,
        ignored_counts=ignored,
        shapes=torch.full((pictures, 2), size),
    )


def losses_of_single_boxes(output, targets):
    """The losses of `center_losses`, written box by box and place by place."""
    logits, distances = output
    pictures, _, rows, columns = logits.shape
    heat, owner = torch.zeros_like(logits), {}
    values = torch.zeros(len(targets.boxes), rows, columns, dtype=logits.dtype)
    picture_of = [picture for picture, count in enumerate(targets.counts.tolist()) for _ in range(count)]
    for number, (left, top, right, bottom) in enumerate(targets.boxes.tolist()):
        near = [
            min(int((low + high) / 2 / 4), last - 1)
            for low, high, last in ((top, bottom, rows), (left, right, columns))
        ]
        half = [0.27 * (bottom - top), 0.27 * (right - left)]
        for row in range(rows):
            for column in range(columns):
                away = [4.0 * (row - near[0]), 4.0 * (column - near[1])]
                if all(abs(a) <= h or a == 0 for a, h in zip(away, half, strict=True)):
                    exponents = [a**2 / (2 * max(h / 3, 1e-3) ** 2) for a, h in zip(away, half, strict=True)]
                    values[number, row, column] = np.exp(-exponents[0]) * np.exp(-exponents[1])
        own = heat[picture_of[number], targets.labels[number]]
        own.copy_(torch.maximum(own, values[number]))
        own[near[0], near[1]] = 1
    for number in overlap.area(targets.boxes).argsort(stable=True, descending=True).tolist():  # the smallest come last
        for place in values[number].nonzero().tolist():
            owner[picture_of[number], *place] = number
    boxes, box = boxes_of(distances), 0.0
    for number in range(len(targets.boxes)):
        own = [place for place, which in owner.items() if which == number]
        shares = [values[number, row, column] for _, row, column in own]
        for (picture, row, column), share in zip(own, shares, strict=True):
            found, true = boxes[picture, :, row, column], targets.boxes[number].to(logits)
            box = box + (1 - overlap.generalised_overlap(found, true)) * share / sum(shares)
    counted = torch.ones(pictures, 1, rows, columns, dtype=torch.bool)
    y, x = (torch.arange(side) * 4 + 2.0 for side in (rows, columns))
    regions = [picture for picture, count in enumerate(targets.ignored_counts.tolist()) for _ in range(count)]
    for picture, (left, top, right, bottom) in zip(regions, targets.ignored.tolist(), strict=True):
        counted[picture, 0] &= ~(((y > top) & (y < bottom))[:, None] & ((x > left) & (x < right)))
    score = logits.sigmoid()
    there, elsewhere = score.log() * (1 - score) ** 2, (1 - score).log() * score**2 * (1 - heat) ** 4 * counted
    return {"center": -torch.where(heat == 1, there, elsewhere).sum(), "box": box}


@pytest.mark.parametrize("at_once", [1, 1000, 1 << 22])
def test_losses_are_those_of_single_boxes_however_many_are_drawn_at_a_time(monkeypatch, at_once):
    monkeypatch.setattr(center_losses_module, "_AT_ONCE", at_once)
    targets, draw = random_targets(), torch.Generator().manual_seed(7)
    output = CenterOutput(
        torch.randn(5, 3, 16, 16, generator=draw, dtype=torch.float64).requires_grad_(),
        (20 * torch.rand(5, 4, 16, 16, generator=draw, dtype=torch.float64)).requires_grad_(),
    )
    results = []
    for losses in (center_losses(output, targets), losses_of_single_boxes(output, targets)):
        gradients = torch.autograd.grad(losses["center"] + losses["box"], output)
        results.append([losses["center"], losses["box"], *gradients])
    for found, wanted in zip(*results, strict=True):
        assert torch.allclose(found, wanted, rtol=1e-10, atol=1e-12)


class NoWaits(TorchDispatchMode):
    """Refuses operations for which a GPU would have to be waited for."""

    waits = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        assert name not in self.waits, name
        if name == "aten::repeat_interleave":
            assert (kwargs or {}).get("output_size") is not None, name
        if name in ("aten::index", "aten::index_put_", "aten::index_put"):
            assert all(index is None or index.dtype != torch.bool for index in args[1]), name
        return func(*args, **(kwargs or {}))


def test_the_loss_and_the_boxes_of_a_batch_wait_for_no_device(folder, monkeypatch):
    task = make_task({}, folder)
    model = task.model()
    training, evaluation = (batch_of(task, range(8), which) for which in (True, False))
    assert len(training["regions"])
    best = model.eval()(torch.zeros(8, 3, 64, 64, dtype=torch.float64))
    model.train()

    def refuse(*_):
        raise AssertionError("a tensor was read")

    for method in ("tolist", "item", "numpy", "__bool__", "__int__", "__float__"):
        monkeypatch.setattr(torch.Tensor, method, refuse)
    with NoWaits():
        weights, losses = task.weight(training), task.loss(model, training)
        sum(losses[head] / weights[head] for head in losses).backward()
        found = Detections(best.distances.flatten(2)[..., :300].mT, best.logits.flatten(1)[:, :300], None)
        places = torch.zeros(8, found.boxes.shape[1], dtype=torch.int64)
        task._together([found._replace(scores=found.boxes[..., 0], labels=places)], evaluation)


def test_the_loss_and_its_gradient_read_no_value_inside_of_torch():
    """Some derivatives of torch (of `prod`, for example) read a value, but not under a mode as above."""
    targets, draw = random_targets(), torch.Generator().manual_seed(7)
    output = CenterOutput(
        torch.randn(5, 3, 16, 16, generator=draw).requires_grad_(),
        (20 * torch.rand(5, 4, 16, 16, generator=draw)).requires_grad_(),
    )
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profiled:
        sum(center_losses(output, targets).values()).backward()
    names = {event.key for event in profiled.key_averages()}
    assert "aten::sigmoid_backward" in names
    assert not names & {"aten::item", "aten::_local_scalar_dense", "aten::nonzero"}


def test_the_right_output_has_no_box_loss_and_crowds_are_no_background():
    targets = targets_of([[8, 8, 40, 32]], [0], [1], ignored=[[40, 40, 64, 64]])
    wanted = center_targets(targets, classes=1, rows=16, columns=16, like=torch.zeros(1))
    middle = boxes_of(torch.zeros(1, 4, 16, 16))
    sides = torch.tensor([-1.0, -1, 1, 1]).view(1, 4, 1, 1)
    right = (torch.tensor([8.0, 8, 40, 32]).view(1, 4, 1, 1) - middle) * sides
    logits = torch.full((1, 1, 16, 16), -20.0)
    logits[wanted.heat == 1] = 20.0
    losses = center_losses(CenterOutput(logits, right), targets)
    assert float(losses["box"]) == pytest.approx(0, abs=1e-5)
    assert float(losses["center"]) == pytest.approx(0, abs=1e-5)
    logits[0, 0, 13, 13] = 5.0  # in the crowd
    assert float(center_losses(CenterOutput(logits, right), targets)["center"]) == pytest.approx(0, abs=1e-5)
    logits[0, 0, 13, 1] = 5.0  # an invented object
    assert float(center_losses(CenterOutput(logits, right), targets)["center"]) > 1


def test_losses_and_units_of_a_batch_are_the_sums_over_its_pictures(folder):
    task = make_task({}, folder)
    model = task.model().eval()
    whole = batch_of(task, range(len(COUNTS)))
    parts = [batch_of(task, [index]) for index in range(len(COUNTS))]
    with torch.no_grad():
        losses, _ = task.loss(model, whole)
        each = [task.loss(model, part)[0] for part in parts]
    for head, value in losses.items():
        assert float(value) == pytest.approx(sum(float(part[head]) for part in each), rel=1e-12)
        assert float(task.weight(whole)[head]) == sum(float(task.weight(part)[head]) for part in parts)
    true = int((~whole["crowd"]).sum())
    without = sum(int((~part["crowd"]).sum()) == 0 for part in parts)
    assert {head: float(units) for head, units in task.weight(whole).items()} == {"center": true + without, "box": true}


def test_a_batch_without_any_box_teaches_background_and_nothing_else(folder):
    task = make_task({}, folder)
    model = task.model().train()
    batch = batch_of(task, [0, 3, 5])
    losses, units = task.loss(model, batch), task.weight(batch)
    assert {head: float(value) for head, value in units.items()} == {"center": 3.0, "box": 0.0}
    assert losses["center"].item() > 0
    assert losses["box"].item() == 0
    sum(losses.values()).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "text"), [("classes.txt", "blue\nred\ngreen\n"), ("names.yaml", "{0: blue, 1: red, 2: green}")]
)
def test_classes_may_be_a_file(folder, tmp_path, name, text):
    (tmp_path / name).write_text(text)
    task, plain = make_task({"classes": str(tmp_path / name)}, folder), make_task({}, folder)
    assert task.classes == ["blue", "red", "green"]
    assert task.about.category_ids == [12, 7, 3]
    place = [task.classes.index(name) for name in plain.classes]
    assert task.train_data()[1].labels.tolist() == [place[label] for label in plain.train_data()[1].labels]
    with pytest.raises(LockstepError, match=f"(?s)no such file of classes.*did you mean {name}"):
        _ = make_task({"classes": str(tmp_path / f"x{name}")}, folder).classes


def test_a_class_that_is_named_twice_is_an_error(folder):
    with pytest.raises(LockstepError, match="the name 'red' is given to several classes"):
        _ = make_task({"classes": ["red", "green", "blue", "red"]}, folder).classes


def test_labels_of_a_mosaic_are_those_of_its_boxes(folder):
    """The colour of a box tells its class: images have no other saturated pixels."""
    augment = {"crop": "scale_jitter", "jitter": [1.0, 1.5], "min_visible": 0.99}
    task = make_task({"mosaic": 1.0, "augment": augment, "image_size": 128}, folder)
    batch = batch_of(task, range(6))
    pictures = torch.repeat_interleave(torch.arange(6), batch["counts"])
    assert len(batch["labels"]) > 10
    colours = [CATEGORIES[number] for number in (7, 3, 12)]  # red, green, blue
    right = 0
    for picture, box, label in zip(pictures.tolist(), batch["boxes"], batch["labels"].tolist(), strict=True):
        x, y = ((box[:2] + box[2:]) / 2).long().tolist()
        right += colours[int(batch["images"][picture, :, y, x].argmax())] == task.classes[label]
    assert right > 0.8 * len(batch["labels"])  # a later box may hide an earlier box
    assert all(torch.equal(prepared(task, 3)[name][0], prepared(task, 3)[name][0]) for name in ("labels", "crowd"))


# ---- views


@pytest.mark.parametrize(
    ("size", "side", "share"), [((100, 100), 100, 0.2), ((301, 97), 100, 0.25), ((101, 333), 64, 0)]
)
def test_tiles_cover_a_picture_and_overlap(size, side, share):
    covered = np.zeros(size, int)
    regions = views.tiles(size, side, share)
    for top, left, height, width in regions:
        assert 0 <= top <= top + height <= size[0]
        assert 0 <= left <= left + width <= size[1]
        covered[top : top + height, left : left + width] += 1
    assert covered.min() >= 1
    tops = sorted({region[0] for region in regions})
    assert all(later - earlier <= side * (1 - share) + 1 for earlier, later in pairwise(tops))


@pytest.mark.parametrize("tile", [None, 60])
def test_boxes_of_views_come_back_to_their_places(tile):
    pixels = np.zeros((90, 150, 3), np.uint8)
    box = torch.tensor([[70.0, 40.0, 80.0, 50.0]])
    options = DetectionOptions(tile=tile, tile_overlap=0.3, augment={"fill": 0, "min_visible": 0.99})
    seen = views.views(AnnotatedImage.from_pixels(pixels, boxes=box), 64, options)
    assert all(view.picture.size == (64, 64) for view in seen)
    back = [
        views.in_image(view.picture.boxes[None], torch.tensor([view.scale]), torch.tensor([view.offset]))
        for view in seen
        if len(view.picture.boxes)
    ]
    assert back
    assert all(torch.allclose(boxes[0], box, atol=0.1) for boxes in back)


class Finder:
    """Stands for a model's library: finds the white pixels of each view as one box."""

    def forward(self, model, images, shapes, targets):
        return images

    def detections(self, model, outputs, *, size, most):
        from lockstep_recipes.tasks.vision.detection.models import Detections

        boxes, scores = torch.zeros(len(outputs), 2, 4), torch.zeros(len(outputs), 2)
        labels = torch.full((len(outputs), 2), -1)
        for number, image in enumerate(outputs):
            rows, columns = (image[0] > 2).nonzero().T
            if len(rows):
                edges = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
                boxes[number, 0] = torch.tensor([float(edge) for edge in edges])
                scores[number, 0], labels[number, 0] = len(rows) / image[0].numel(), 0
        return Detections(boxes, scores, labels)


def test_a_large_picture_in_tiles_gives_each_object_once(tmp_path):
    root = box_folder(tmp_path, counts=(1, 1))
    pixels = np.zeros((200, 300, 3), np.uint8)
    pixels[90:110, 140:160] = 255  # in several tiles
    Image.fromarray(pixels).save(tmp_path / "large.png")
    task = make_task({"image_size": 128, "tile": 128, "tile_overlap": 0.4, "augment": {"fill": 0}}, root, double=False)
    task.__dict__["about"] = task.about
    task.__dict__["models"] = Finder()
    sample = task.presenter(task).inputs([str(tmp_path / "large.png")])[0]
    batch = task.collate([task.prepare(sample, 0, False)])
    assert int(batch["views"]) == len(batch["images"]) == 8
    output = task.predict(torch.nn.Linear(1, 1), batch)
    (found,) = output["boxes"][output["labels"] >= 0].tolist()
    assert found == pytest.approx([140, 90, 160, 110], abs=1.5)


# ---- mean average precision


def found_boxes(content, seed, most):
    """Random detections of each image of a COCO file: near the true boxes, and anywhere."""
    draw = np.random.default_rng(seed)
    found = {}
    for image in content["images"]:
        true = [box for box in content["annotations"] if box["image_id"] == image["id"]]
        count = int(draw.integers(0, most + 1))
        boxes, labels = draw.uniform(0, 60, (count, 4)).astype(np.float32), draw.integers(0, len(CATEGORIES), count)
        for place in range(min(len(true), count)):
            boxes[place] = np.array(true[place]["bbox"]) + draw.normal(0, 2, 4)
            labels[place] = sorted(CATEGORIES).index(true[place]["category_id"])
        boxes[:, 2:] = boxes[:, :2] + np.abs(boxes[:, 2:]) + 1
        scores = (draw.integers(1, 200, count) / 200).astype(np.float32)  # many are equal
        found[image["id"]] = boxes, scores, labels
    return found


def by_pycocotools(file, results):
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(file)
        evaluation = COCOeval(truth, truth.loadRes(results), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return evaluation


def add_found(metric, found, places):
    """Feed a metric as the task does, an image at a time."""
    for image_id, (boxes, scores, labels) in found.items():
        padded = torch.zeros(1, places, 4), torch.zeros(1, places), torch.full((1, places), -1)
        for part, values in zip(padded, (boxes, scores, labels), strict=True):
            part[0, : len(values)] = torch.from_numpy(values)
        metric.update(*padded, torch.tensor([image_id]))


@pytest.mark.parametrize(("seed", "most"), [(0, 30), (1, 30), (2, 450), (3, 0)])
def test_the_metric_is_that_of_pycocotools_on_the_same_files(folder, seed, most):
    """450 boxes: more than pycocotools uses of an image and class. 0: no box at all."""
    file = f"{folder}/annotations/instances_train.json"
    content = json.loads(Path(file).read_text())
    task = make_task({}, folder, file)
    metric = task.metrics().metrics["boxes"]
    found, ids = found_boxes(content, seed, most), task.eval_data().category_ids.tolist()
    assert sorted(ids) == sorted(CATEGORIES)
    add_found(metric, found, max(most, 1))
    values = metric.compute()
    results = [
        {
            "image_id": image_id,
            "category_id": ids[label],
            "bbox": [box[0], box[1], box[2] - box[0], box[3] - box[1]],
            "score": score,
        }
        for image_id, (boxes, scores, labels) in found.items()
        for box, score, label in zip(boxes.tolist(), scores.tolist(), labels.tolist(), strict=True)
    ]
    if not results:
        assert float(values["mAP"]) == 0.0  # pycocotools itself refuses an empty file
        return
    evaluation = by_pycocotools(file, results)
    for name, value in zip(("mAP", "mAP50", "mAP75"), evaluation.stats[:3], strict=True):
        assert float(values[name]) == value
    for name, value in zip(("mAP_small", "mAP_medium", "mAP_large"), evaluation.stats[3:6], strict=True):
        assert float(values.get(name, -1.0)) == value
    assert float(values["mAR"]) == evaluation.stats[8]
    precision = evaluation.eval["precision"]  # classes in the order of their ids
    for label, name in enumerate(task.classes):
        assert float(values[f"mAP/{name}"]) == precision[:, :, sorted(ids).index(ids[label]), 0, 2].mean()
    curve = precision[0, :, [sorted(ids).index(number) for number in ids], 0, 2]
    assert np.array_equal(values["precision_recall"].numpy(), curve)
    assert float(values["mAP50"]) > 0.01


@pytest.mark.parametrize(("world", "micro"), mainly([(3, 4)], [(2, 3), (2, 4), (3, 3), (3, 4)]))
def test_metrics_are_identical_on_any_number_of_ranks(folder, held_out, world, micro):
    """7 images: on 3 ranks with micro-batches of 3, a rank has a single image, and with 4 a rank has none."""
    settings = runs.config(
        batch={"global": 12, "micro": micro},
        train={"steps": 1, "eval_every_steps": 1},
        optim={"name": "SGD", "lr": 1e-30},
    )
    (reference,) = run_ranks(1, results_of, {}, folder, held_out, settings)
    assert {"eval/mAP", "eval/mAP50", "eval/mAP75", "eval/mAP/red", "eval/loss/box"} <= reference.keys()
    assert reference["eval/samples"] == 7
    for results in run_ranks(world, results_of, {}, folder, held_out, settings):
        assert results == reference


# ---- ranks, accumulation, crashes


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.exhaustive, id="flip"),
        pytest.param({"mosaic": 0.5, "augment": {"crop": "scale_jitter", "trivialaugment": True}}, id="mosaic"),
    ],
)
@pytest.mark.parametrize(("world", "micro"), mainly([(2, 1)], [(2, 1), (3, 2)]))
def test_ranks_and_accumulation_change_nothing(folder, options, world, micro):
    """The images have 0 to 14 boxes; some micro-batches have none."""
    settings = runs.config(batch={"global": 6}, train={"steps": 6}, optim={"lr": 0.003})
    (reference, _), *_ = run_ranks(1, fit, options, folder, None, settings)
    cut = settings | {"batch": {"global": 6, "micro": micro}}
    for weights, _ in run_ranks(world, fit, options, folder, None, cut):
        assert runs.difference(weights, reference) < 1e-10


@pytest.mark.exhaustive
@pytest.mark.parametrize("step", [2, 5])
def test_a_killed_run_ends_with_the_same_bits(folder, tmp_path, step):
    options = {"batch_norm": "batch"}
    settings = runs.config(
        batch={"global": 6, "micro": 3}, train={"steps": 7}, checkpoint={"every_steps": 1, "mode": "sync"}
    )
    (reference,) = run_ranks(1, fit_to_the_end, options, folder, settings, str(tmp_path / "whole"))
    with pytest.raises(RankFailed):
        run_ranks(1, fit_and_die, options, folder, settings, str(tmp_path / "killed"), step)
    (weights,) = run_ranks(1, fit_to_the_end, options, folder, settings, str(tmp_path / "killed"))
    assert weights.keys() == reference.keys()
    assert all(torch.equal(weights[name], reference[name]) for name in reference)


# ---- people


def test_matching_counts_missed_and_invented_boxes():
    true = torch.tensor([[0.0, 0, 10, 10], [20, 20, 30, 30], [50, 50, 90, 90]])
    labels, crowd = torch.tensor([0, 1, 0]), torch.tensor([False, False, True])
    found = torch.tensor([[0.0, 0, 10, 9], [1, 0, 10, 10], [20, 20, 30, 30], [52, 52, 60, 60], [52, 70, 60, 80]])
    matched = matching.match(found, torch.tensor([0, 0, 0, 0, 0]), true, labels, crowd)
    assert matched.right.tolist() == [True, False, False, True, True]  # a double, another class, two in the crowd
    assert (matched.missed, matched.invented) == (1, 2)
    nothing = matching.match(torch.zeros(0, 4), torch.zeros(0), true, labels, crowd)
    assert (nothing.missed, nothing.invented) == (2, 0)


def test_a_training_learns_and_its_rows_are_a_file_of_coco_results(folder, tmp_path):
    settings = runs.config(
        task={
            "kind": "detection",
            "image_size": 64,
            "scratch": {"sizes": {"width": 16}},
            "augment": {"crop": "resize"},
        },
        data={"train": folder, "eval": f"{folder}/annotations/instances_train.json"},
        batch={"global": 6},
        train={"steps": 60, "eval_every_steps": 60},
        optim={"lr": 0.005, "clip_norm": 10.0},
    )
    trainer = Trainer(settings, run_dir=tmp_path / "run", quiet=True)
    results = trainer.fit()
    assert results["eval/mAP50"] > 0.1
    task = trainer.task()
    outputs = trainer.predict(task)
    presenter, data = task.presenter(task), task.eval_data()
    rows = [row for index, output in enumerate(outputs) for row in presenter.rows(data[index], output)]
    evaluation = by_pycocotools(f"{folder}/annotations/instances_train.json", rows)
    assert evaluation.stats[0] == results["eval/mAP"]
    assert evaluation.stats[1] == results["eval/mAP50"]

    batch = task.collate([task.prepare(data[index], 0, False) for index in (1, 0)])
    output = {name: torch.stack([outputs[1][name], outputs[0][name]]) for name in outputs[0]}
    wrong = presenter.mistakes(output, batch).tolist()
    sample, item = data[1], task.prepare(data[1], 0, False)
    assert f"{len(sample.boxes)} boxes, " in presenter.caption(sample, item, outputs[1])
    assert wrong[1] == len(presenter.describe(outputs[0])["boxes"])  # the image has no box: all are invented
    assert presenter.picture(sample, item, outputs[1]).shape[1] == presenter.picture_side
    assert presenter.picture(sample, task.prepare(sample, 0, True), None).ndim == 3
    (file,) = presenter.files(sample, outputs[1]).values()
    width, height = Image.open(io.BytesIO(file)).size
    assert width == sample.size[1]
    assert height > sample.size[0]  # a legend is below

    described = trainer.describe([f"{folder}/images/train/001.png"])
    assert described[0]["boxes"]
    assert set(described[0]["boxes"][0]) == {"class", "score", "box"}

    check_ids_of_inputs(trainer, folder, results, tmp_path)


def test_rows_of_data_without_a_coco_file_have_no_image_id(tmp_path):
    for split in ("train", "val"):
        yolo(tmp_path, split)
    task = make_task({}, str(tmp_path), str(tmp_path))
    output = {"boxes": torch.ones(2, 4), "scores": torch.tensor([0.5, 0.0]), "labels": torch.tensor([1, -1])}
    (row,) = task.presenter(task).rows(task.eval_data()[0], output)
    assert "image_id" not in row
    assert row["file_name"].endswith("images/val/a.png")


def check_ids_of_inputs(trainer, folder, results, tmp_path):
    """Predictions of a COCO file, and of images of the run's data, are COCO results of this file; other images have
    names and no ids."""

    def rows_of(*inputs):
        found = []
        trainer.predict_rows(lambda rows, readable: found.extend(rows), inputs, by_row=True)
        return found

    own, images = f"{folder}/annotations/instances_train.json", f"{folder}/images/train"
    content = json.loads(Path(own).read_text())
    for inputs in ([own], [f"{images}/{number:03}.png" for number in (4, 1, 7)]):
        rows = rows_of(*inputs)
        wanted = {image["file_name"]: image["id"] for image in content["images"]}
        assert all(wanted[Path(row["input"]).name] == row["image_id"] for row in rows)
        assert all(row["file_name"] == Path(row["input"]).name for row in rows)
        if len(inputs) == 1:
            assert by_pycocotools(own, rows).stats[0] == results["eval/mAP"]

    (tmp_path / "images").mkdir()
    for number in (3, 1):
        (tmp_path / "images" / f"{number:03}.png").write_bytes(Path(images, f"{number:03}.png").read_bytes())
    rows = rows_of(str(tmp_path / "images"))
    assert {row["file_name"] for row in rows} == {"001.png", "003.png"}
    assert not any("image_id" in row for row in rows)

    # A file of test images: without annotations, with other numbers of images and classes.
    images = [{"id": 8, "file_name": "003.png"}, {"id": 6, "file_name": "001.png"}]
    categories = [{"id": 40, "name": "green"}, {"id": 41, "name": "red"}]
    file = tmp_path / "image_info_test.json"
    file.write_text(json.dumps({"images": images, "categories": categories}))
    rows = rows_of(str(file))
    assert {(row["file_name"], row["image_id"]) for row in rows} == {("003.png", 8), ("001.png", 6)}
    numbers = {"green": 40, "red": 41, "blue": -1}
    assert {row["class"]: row["category_id"] for row in rows} == {row["class"]: numbers[row["class"]] for row in rows}
    with pytest.raises(LockstepError, match="two COCO files"):
        rows_of(str(file), own)
    file.write_text(json.dumps({"images": [*images, {"id": 7, "file_name": "9.png"}], "categories": categories}))
    with pytest.raises(LockstepError, match=r"no file .*9\.png \(1 of 3 images are missing\)"):
        rows_of(str(file))


def test_pictures_without_a_shown_box_are_described_by_their_best_scores(folder):
    task = make_task({}, folder)
    first, second = (
        task.presenter(task).describe(
            {"boxes": torch.zeros(1, 4), "scores": torch.tensor([score]), "labels": torch.zeros(1, dtype=torch.int64)}
        )
        for score in (0.010001, 0.010003)
    )
    assert first == {"boxes": [], "best_score": 0.010001}
    assert second == {"boxes": [], "best_score": 0.010003}


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"widht": 32}, "unknown key"), ({"width": 20}, "multiple of 16"), ({"levels": 0}, "positive integer")],
)
def test_bad_sizes_of_the_detector_are_errors(folder, sizes, message):
    with pytest.raises(LockstepError, match=message):
        make_task({"scratch": {"sizes": sizes}}, folder).model()


@pytest.mark.parametrize("count", [99, 150])
def test_perfect_boxes_have_a_perfect_map_however_many_an_image_has(tmp_path, count):
    """COCO's limit of 100 boxes per image and class would give 150 perfect boxes 0.663."""
    (tmp_path / "images").mkdir()
    Image.new("RGB", (320, 320)).save(tmp_path / "images" / "a.png")
    corners = [(20 * (number % 15), 20 * (number // 15)) for number in range(count)]
    boxes = [[left, top, 10, 10] for left, top in corners]
    rows = [{"id": 1 + number, "image_id": 1, "category_id": 1, "bbox": box} for number, box in enumerate(boxes)]
    images = [{"id": 1, "file_name": "a.png", "height": 320, "width": 320}]
    content = {"images": images, "annotations": rows, "categories": [{"id": 1, "name": "cell"}]}
    (tmp_path / "a.json").write_text(json.dumps(content))
    task = make_task({"most_boxes": 120, "images": str(tmp_path / "images")}, str(tmp_path / "a.json"))
    task.eval_source = task.train_source
    metric = task.metrics().metrics["boxes"]
    true = torch.tensor(boxes, dtype=torch.float32)
    true[:, 2:] += true[:, :2]
    ones = torch.ones(1, count)
    metric.update(true[None], ones, torch.zeros(1, count, dtype=torch.int64), torch.tensor([1]))
    assert float(metric.compute()["mAP"]) == 1.0
    lines = "\n".join(task.presenter(task).log_header())
    assert ("an image has 150 objects of a class, so as many boxes count" in lines) == (count == 150)
    assert ("the recall cannot exceed 0.800" in lines) == (count == 150)
