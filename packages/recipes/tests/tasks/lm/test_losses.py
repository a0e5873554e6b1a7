"""The loss in chunks, and answers with numbers."""

import copy
import weakref

import peft
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.core import blocks
from lockstep.core.config.sections import ComputeConfig
from lockstep.core.errors import UsageError
from lockstep_recipes.tasks.lm import answers, losses, models
from lockstep_recipes.tasks.lm import task as task_module
from tests import lm_cases, runs
from tests.lm_cases import json_lines, small_task
from tests.ranks import run_ranks
from tests.selection import mainly


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return lm_cases.corpus(tmp_path_factory.mktemp("corpus"))


class Logits(TorchDispatchMode):
    """The numbers in tensors with a number for each word that are there after each operation."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.tensors, self.largest = vocabulary, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.shape[-1:] == (self.vocabulary,):
            self.tensors.append(weakref.ref(made))
            self.largest = max(self.largest, self.now())
        return made

    def now(self):
        there = {id(found): found.numel() for tensor in self.tensors if (found := tensor()) is not None}
        return sum(there.values())


def loss_and_gradients(corpus, kind, chunk):
    task = small_task(corpus, **lm_cases.MODELS[kind], loss_chunk=chunk, prompts=[])
    torch.manual_seed(0)
    model = task.model().double()
    data = task.train_data()
    batch = task.collate([data[index] for index in range(4)])
    with Logits(len(task.tokenizer)) as counted:
        loss = task.loss(model, batch)
        kept = counted.now()
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    output = task.predict(model.eval(), batch)
    return loss.item(), gradients, (kept, counted.largest), output


@pytest.mark.parametrize("kind", list(lm_cases.MODELS))
def test_the_loss_in_chunks_is_the_loss_and_holds_no_logits(corpus, kind):
    whole, gradients, (kept, _), output = loss_and_gradients(corpus, kind, None)
    vocabulary, places = 300, 4 * 32
    assert kept >= vocabulary * places  # without chunks, the backward pass needs the logits of all places
    for chunk in (7, 1000):
        loss, found, (kept, largest), of_chunks = loss_and_gradients(corpus, kind, chunk)
        assert kept == 0
        assert 0 < largest <= vocabulary * (3 * chunk + 16)  # logits, two results, and the weights of 16 numbers a word
        assert loss == pytest.approx(whole, rel=1e-13)
        for one, other in zip(found, gradients, strict=True):
            assert float((one - other).abs().max()) < 1e-12 * float(other.abs().max() + 1)
        assert torch.allclose(of_chunks["nats"], output["nats"], rtol=1e-13)
        assert torch.equal(of_chunks["right"], output["right"])


@pytest.mark.parametrize("autocast", [False, True])
def test_the_loss_in_chunks_in_16_bits_is_nearer_than_a_sum_in_16_bits(autocast):
    """The sum of many chunks is in float32, and so is the factor of the backward pass."""
    torch.manual_seed(0)
    head, targets = torch.nn.Linear(16, 30).bfloat16(), torch.randint(30, (4096,))
    targets[::5] = -100
    hidden = torch.randn(4096, 16).bfloat16()

    def gradients(dtype, total):
        made, given = copy.deepcopy(head).to(dtype), hidden.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype == torch.float32):
            loss = total(made, given) / 4097
        loss.backward()
        assert all(found.dtype == dtype for found in (given.grad, made.weight.grad, made.bias.grad))
        return [loss.detach(), given.grad, made.weight.grad, made.bias.grad]

    def part_by_part(made, given):
        pairs = zip(given.split(16), targets.split(16), strict=True)
        return torch.stack([losses.total(made(part), wanted) for part, wanted in pairs]).sum()

    dtype = torch.float32 if autocast else torch.bfloat16
    exact, summed = gradients(torch.float64, part_by_part), gradients(dtype, part_by_part)
    found = gradients(dtype, lambda made, given: losses.total_in_chunks(made, given, targets, 16))
    for right, one, other in zip(exact, summed, found, strict=True):
        assert float((other - right).norm()) <= 1.02 * float((one - right).norm()) + 1e-5 * float(right.norm())
    if not autocast:
        assert float((found[2] - exact[2]).norm()) < 0.5 * float((summed[2] - exact[2]).norm())


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_gradient_of_a_chunk_is_that_of_torch_compiled_and_as_written(dtype):
    torch.manual_seed(0)
    logits, targets = (3 * torch.randn(64, 50)).to(dtype), torch.randint(50, (64,))
    logits[0, targets[0]] = 30  # a target that is almost certain: its gradient is small
    targets[1::5] = -100
    exact = logits.double().clone().requires_grad_()
    right = losses.total(exact, targets)
    right.backward()
    learned, eps = (targets != -100)[:, None], torch.finfo(dtype).eps
    for of_chunk in (losses.with_gradient, losses.compiled(backend="aot_eager")):
        for size in (64, 40):  # the last chunk is smaller
            loss, gradient = of_chunk(logits[:size], targets[:size])
            assert gradient.dtype == dtype
            assert torch.allclose(gradient.double() * learned[:size], exact.grad[:size], rtol=eps, atol=1e-7)
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
    assert losses.with_gradient(logits, targets)[0].item() == pytest.approx(right.item(), rel=1e-6)


class OverLogits(TorchDispatchMode):
    """The operations that read or write all logits of a chunk."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.names = shape, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if getattr(made, "shape", None) == self.shape and not name.startswith(("empty", "scatter")):
            self.names.append(name)
        return made


def test_a_chunk_passes_over_its_logits_few_times():
    targets = torch.randint(50, (64,))
    for dtype, names in ((torch.float32, []), (torch.bfloat16, ["_to_copy"])):
        logits = torch.zeros(64, 50, dtype=dtype)
        with OverLogits((64, 50)) as counted:
            losses.with_gradient(logits, targets)
        assert [name.strip("_") for name in counted.names] == [
            name.strip("_") for name in [*names, "log_softmax", "exp"]
        ]


@pytest.mark.filterwarnings("ignore")  # torch.compile warns of itself
def test_the_loss_of_compiled_blocks_is_compiled_on_a_gpu(corpus, monkeypatch):
    compute = ComputeConfig(compile="blocks", compile_backend="eager")
    task = small_task(corpus, length=32)
    model = task.model()
    batch = task.collate([task.train_data()[0]])
    plain = task.loss(model, batch)
    blocks.compile_modules(model, list(blocks.find_blocks(model).values()), compute)
    calls = []

    def compiled(**options):
        calls.append(options)
        return losses.with_gradient

    monkeypatch.setattr(losses, "compiled", compiled)
    assert torch.allclose(task.loss(model, batch), plain, rtol=1e-6)
    assert not calls
    monkeypatch.setattr(task_module, "_COMPILES", ("cpu",))
    assert torch.allclose(task.loss(model, batch), plain, rtol=1e-6)
    assert calls == [{"backend": "eager", "mode": None, "dynamic": None}]


@pytest.mark.parametrize("strategy", mainly(["fsdp"], ["ddp", "fsdp"]))
def test_the_loss_in_chunks_trains_on_two_ranks_as_by_hand(corpus, strategy):
    options = {"train": corpus, **lm_cases.SMALL}
    settings = runs.config(
        batch={"global": 8, "micro": 2},
        train={"steps": 4},
        optim={"name": "SGD", "lr": 0.5, "weight_decay": 0.0},
        parallel={"strategy": strategy},
    )
    (weights, _), *_ = run_ranks(2, lm_cases.train, options | {"loss_chunk": 5}, settings)
    assert lm_cases.difference(weights, lm_cases.by_hand(options, 4, 8, 0.5)[0]) < 1e-10


def train_in_32_bits(options, settings):
    return runs.fit(small_task(**options), settings)


def test_shared_heads_and_chunks_have_the_same_bits_on_one_to_three_ranks(corpus):
    options = {"train": corpus, **lm_cases.SMALL, "loss_chunk": 5, "prompts": []}
    settings = runs.config(batch={"global": 12}, train={"steps": 3}, parallel={"virtual_ranks": 6})
    alone, of_two, of_three = (run_ranks(world, train_in_32_bits, options, settings)[0] for world in (1, 2, 3))
    for weights, logged in (of_two, of_three):
        assert all(torch.equal(weights[name], alone[0][name]) for name in alone[0])
        assert logged["train/loss"] == alone[1]["train/loss"]


def test_a_model_whose_logits_need_more_than_a_layer_is_refused(corpus):
    sizes = {**lm_cases.LLAMA, "model_type": "gemma2", "head_dim": 4, "final_logit_softcapping": 0.01}
    task = small_task(corpus, config=sizes, loss_chunk=8)
    with pytest.raises(UsageError, match=r"task.loss_chunk: Gemma2ForCausalLM computes its logits with more"):
        task.model()
    models.check_head(small_task(corpus, config=lm_cases.LLAMA).model(), 300, "Llama")


SIZES = {**lm_cases.LLAMA, "num_key_value_heads": 4, "tie_word_embeddings": False, "pad_token_id": 0}
NEOX = {key: SIZES[key] for key in SIZES if key != "num_key_value_heads"}
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", models.PLAIN_HEADS)
def test_usual_models_make_their_logits_by_their_last_layer(corpus, kind):
    sizes = {"gpt2": lm_cases.GPT2, "gpt_neox": NEOX}.get(kind, SIZES)
    task = small_task(corpus, config={**sizes, "model_type": kind})
    model = task.model()
    models.check_head(model, 300, kind)
    assert task.loss_chunk(model, CPU) == 2**21 // models.vocabulary(task.config)


@pytest.mark.exhaustive
def test_a_model_that_is_compiled_as_a_whole_has_no_chunks(corpus):
    compute = ComputeConfig(compile="model", compile_backend="eager")
    task = small_task(corpus, length=32)
    model = task.model()
    batch = task.collate([task.train_data()[0]])
    plain = task.loss(model, batch)
    blocks.compile_modules(model, [], compute)
    calls = []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert torch.allclose(task.loss(model, batch), plain, rtol=1e-6)
    assert calls, "the compiled call is that of the whole model"
    task = small_task(corpus, length=32, loss_chunk=8)
    model = task.model()
    blocks.compile_modules(model, [], compute)
    with pytest.raises(UsageError, match=r"task.loss_chunk: compute.compile=model compiles the whole model"):
        task.loss(model, batch)


def test_adapters_of_the_last_layer_and_other_models_have_no_chunks(corpus):
    task = small_task(corpus, config=lm_cases.LLAMA | {"tie_word_embeddings": False})
    model = task.model()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["lm_head"]), model)
    assert task.loss_chunk(model, CPU) is None
    with pytest.raises(UsageError, match=r"task.loss_chunk: Llama computes its logits with more"):
        models.check_head(model, 300, "Llama")
    task = small_task(corpus, config={**lm_cases.LLAMA, "model_type": "gemma2", "head_dim": 4})
    assert task.loss_chunk(task.model(), CPU) is None


# ---- answers


@pytest.mark.parametrize(
    ("text", "number"),
    [("so 3 + 4 = 7.", 7), ("1,200 #### 1,300 apples 5", 1300), ("#### -2.5", -2.5), ("none", None), ("7 ####", None)],
)
def test_the_number_of_an_answer(text, number):
    assert answers.number_in(text) == number


def test_answers_match_by_their_numbers():
    assert answers.is_match("it is 7.0", "3 + 4 = 7 #### 7")
    assert not answers.is_match("it is 8", "#### 7")
    assert not answers.is_match("none", "none")


@pytest.mark.parametrize("world", mainly([2], [1, 2]))
def test_questions_are_answered_and_counted_once_on_any_ranks(tmp_path, world):
    rows = [{"question": f"the number {number % 3}", "answer": f"so #### {number % 3}"} for number in range(40)]
    name = json_lines(tmp_path / "qa.jsonl", rows)
    options = {"train": name, "eval": name, "exact_match": 20, "new_tokens": 12, "prompts": ["the number 1"]}
    options |= {"tokenizer": "characters", "length": 64, "small": {"layers": 2, "width": 32, "heads": 2}}
    settings = runs.config(batch={"global": 8, "micro": 2}, train={"steps": 60, "eval_every_steps": 60})
    (weights, results), *_ = run_ranks(world, lm_cases.train, options, settings)
    task = small_task(**options)
    data = task.eval_data()
    asked = [prompt for index in range(len(data)) for prompt in data[index].prompts if prompt.answer is not None]
    assert len(asked) == 20
    assert {(prompt.text[-2:], prompt.answer[-1]) for prompt in asked} == {(f"{n}\n", str(n)) for n in range(3)}
    model = task.model().double().eval()
    model.load_state_dict(weights)
    right = 0
    for prompt in asked:
        ids = list(prompt.ids)
        while len(ids) < len(prompt.ids) + 12 and (len(ids) == len(prompt.ids) or ids[-1] != 0):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        right += answers.is_match(task.tokenizer.decode(ids[len(prompt.ids) :]), prompt.answer)
    assert 0 < right < 20
    assert results["eval/exact_match"] == right / 20
    output = task.predict(model, task.collate([data[0], data[1]]))
    assert output["asked"].tolist() == [len(data[0].prompts) - 1, len(data[1].prompts)]
    plain = json_lines(tmp_path / "plain.jsonl", [{"text": "a b"}] * 3)
    with pytest.raises(UsageError, match=r"task.exact_match: the evaluation has no questions"):
        small_task(plain, plain, exact_match=3).eval_data()
