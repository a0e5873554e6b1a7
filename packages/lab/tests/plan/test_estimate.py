"""The arithmetic of an estimate, on facts that are written down."""

from dataclasses import replace

import pytest

from lockstep.core.errors import UsageError
from lockstep_lab.plan.estimate import _sharded_moment, _sizes, estimate
from lockstep_lab.plan.inputs import Machines, OptimizerFacts, ParameterFacts, Segment, Setting
from lockstep_lab.plan.search import at_micro_batch
from packages.lab.tests.plan.cases import adam_parameter, world, written_facts

BLOCK, ROOT = 40 * 20 * 4, 40 * 2 * 4  # bytes of the parameters of a block, and of the root
ALL = 2 * BLOCK + ROOT


def memory(strategy="ddp", *, gpus=8, precision="fp32", micro=4, facts=None, **options):
    setting = Setting(world(gpus), strategy, precision, micro, **options)
    return estimate(facts or written_facts(), setting).memory


def test_seven_billion_parameters_with_adam_are_112_gb_and_14_gb_over_eight():
    """The figures of Rajbhandari et al. 2020 (arXiv:1910.02054) for fp32: 4 + 4 + 8 bytes for each parameter."""
    facts = written_facts([adam_parameter("all", (7_000_000, 1000))], blocks=0)
    assert memory("ddp", facts=facts).states_bytes == 112_000_000_000
    assert memory("fsdp", facts=facts).states_bytes == 14_000_000_000


def test_parts_of_the_peak_add_up_to_it():
    for strategy, gpus in (("single", 1), ("ddp", 8), ("fsdp", 8), ("hybrid", 16)):
        for accumulate in (1, 3):
            found = memory(strategy, gpus=gpus, accumulate=accumulate)
            assert sum(found.at_peak.values()) == found.peak_bytes
            assert found.peak_bytes >= found.parameters_bytes + found.optimizer_bytes


def test_ddp_keeps_its_buckets_and_one_rank_its_gradients_as_they_come():
    one, many = memory("single", gpus=1), memory("ddp")
    assert one.at_peak["gradients"] == 0  # the peak is in the forward pass
    assert many.at_peak["gradients"] == ALL
    assert memory("single", gpus=1, accumulate=2).at_peak["gradients"] == ALL


def test_without_views_of_buckets_gradients_exist_twice():
    with_views, without = memory("ddp"), memory("ddp", gradient_as_bucket_view=False)
    assert with_views.communication_bytes == 0
    assert without.communication_bytes == ALL


def test_accumulation_under_ddp_keeps_gradients_beside_the_buckets():
    found = memory("ddp", accumulate=2)
    assert (found.at_peak["gradients"], found.at_peak["communication"]) == (ALL, ALL)


def test_fsdp_gathers_the_root_and_a_block_and_keeps_the_buffer_of_the_gathering():
    found = memory("fsdp")
    assert found.parameters_bytes == ALL / 8
    assert found.at_peak["communication"] == ROOT + 2 * BLOCK
    whole = memory("fsdp", reshard_after_forward=False)
    assert whole.at_peak["communication"] == ROOT + 3 * BLOCK


def test_rows_that_do_not_divide_are_filled_up():
    assert adam_parameter("odd", (9, 10)).elements_per_rank(8) == 20
    assert adam_parameter("few", (3, 10)).elements_per_rank(8) == 10


def test_fsdp_with_accumulation_keeps_whole_gradients():
    assert memory("fsdp", accumulate=2).at_peak["gradients"] == ALL
    assert memory("fsdp").gradients_bytes == ALL / 8


def test_gradients_that_are_reduced_with_each_micro_batch_are_never_whole():
    early = {"accumulate": 2, "reduce_each_micro_batch": True}
    assert memory("fsdp", **early).gradients_bytes == ALL / 8
    assert memory("fsdp", **early).peak_bytes < memory("fsdp", accumulate=2).peak_bytes
    assert sent("fsdp", **early)["reduce_scatter"] == 2 * sent("fsdp", accumulate=2)["reduce_scatter"]


def test_large_embeddings_and_last_layers_are_gathered_as_blocks():
    """An embedding, two blocks, and a last layer that stays gathered until the backward pass; all of the same size."""
    parameters = [adam_parameter(name, (40, 20), n) for n, name in enumerate(("embedding", "0", "1", "last"))]
    facts = written_facts(parameters, activations=0.0, ends=(1, 1))
    inside, behind = (Segment("forward", block, before) for block, before in ((3, 2), (None, 3)))
    begin, first = Segment("backward", None, None), Segment("backward", 0, 1)
    gathered = {}
    for segment in (inside, behind, begin, first):
        passes = {("fp32", False, None): replace(facts.passes["fp32", False, None], segments=(segment,))}
        setting = Setting(world(), "fsdp", "fp32", 4)
        gathered[segment] = _sharded_moment(replace(facts, passes=passes), setting, segment, 0, _sizes(facts, setting))
    assert gathered[inside]["communication"] == 2 * BLOCK  # with the buffer of its gathering
    assert gathered[behind]["communication"] == 2 * BLOCK
    assert gathered[begin]["communication"] == BLOCK
    assert gathered[first]["communication"] == 2 * BLOCK  # it, and the gradients of the block before
    assert estimate(facts, setting).communication.sent_bytes["all_gather"] == 7 / 8 * 7 * BLOCK


def test_gathered_in_bf16_parameters_take_half():
    narrow = memory("fsdp", param_dtype="bf16", precision="bf16")
    assert narrow.at_peak["communication"] == (ROOT + 2 * BLOCK) / 2
    assert narrow.parameters_bytes == ALL / 8  # the masters stay in fp32


def test_activations_of_gathered_parameters_are_those_of_their_own_trace():
    facts = written_facts()
    halved = replace(facts, passes={**facts.passes, ("bf16", False, "bf16"): facts.passes["bf16", True, None]})
    known = {
        name: memory(name, facts=halved, precision="bf16", param_dtype="bf16").activations_bytes
        for name in ("ddp", "fsdp")
    }
    assert known["fsdp"] == known["ddp"] / 4
    assert memory("fsdp", facts=halved, precision="bf16").activations_bytes == known["ddp"]


def test_fp16_updates_without_the_fused_kernel():
    without = OptimizerFacts("AdamW", 4.0, 0.0)
    facts = written_facts(activations=0.0, optimizer_of_fp16=without)
    assert memory("ddp", facts=facts, precision="bf16").at_peak["activations"] == 0
    assert memory("ddp", facts=facts, precision="fp16").at_peak["activations"] == ALL


def test_offloading_moves_states_to_the_host():
    found = memory("fsdp", offload=True)
    assert found.states_bytes == 0
    assert found.host_bytes == ALL * 4 / 8


def test_hybrid_shards_inside_of_a_node():
    assert memory("hybrid", gpus=32).parameters_bytes == ALL / 8
    assert memory("fsdp", gpus=40).parameters_bytes == ALL / 40


def test_frozen_parameters_have_neither_gradient_nor_state():
    frozen = ParameterFacts("frozen", (100, 10), 4, trainable=False, block=None)
    assert memory("ddp", facts=written_facts([frozen], blocks=0)).states_bytes == 4000


def test_averages_are_kept_in_fp32():
    narrow = ParameterFacts("narrow", (100, 10), 2, trainable=True, block=None)
    found = memory("ddp", facts=written_facts([narrow], blocks=0, averages=True))
    assert found.averages_bytes == 4000


def test_temporary_tensors_of_an_update_count():
    facts = written_facts(activations=0.0, optimizer=OptimizerFacts("AdamW", 4.0, 0.0))
    found = memory("ddp", facts=facts)
    assert found.peak_is_in == "update"
    assert found.at_peak["activations"] == ALL


def sent(strategy, gpus=8, **options):
    return estimate(written_facts(), Setting(world(gpus), strategy, "fp32", 4, **options)).communication.sent_bytes


def test_bytes_that_a_gpu_sends():
    assert sent("single", 1) == {}
    assert sent("ddp") == {"all_reduce": 2 * 7 / 8 * ALL}
    assert sent("fsdp") == {"all_gather": 7 / 8 * (4 * BLOCK + ROOT), "reduce_scatter": 7 / 8 * ALL}
    assert sent("fsdp", accumulate=3)["all_gather"] == 3 * sent("fsdp")["all_gather"]
    assert sent("hybrid", 16) == {**sent("fsdp"), "all_reduce": ALL / 8}  # 2 * 1/2 of a shard


def test_times():
    fast = world(peak_flops={"fp32": 1e12}, link_bytes_per_second=1e3, utilisation=0.5)
    found = estimate(written_facts(), Setting(fast, "ddp", "fp32", 4, accumulate=2))
    assert found.compute_seconds == pytest.approx(8 * 6e9 / 0.5e12)
    assert found.communication.seconds == pytest.approx(2 * 7 / 8 * ALL / 1e3)
    assert found.step_seconds == found.communication.seconds  # the longer of the two
    assert found.steps_per_epoch == 16  # 1000 samples in batches of 64
    assert found.training_seconds == pytest.approx(48 * found.step_seconds)
    longer = estimate(written_facts(min_steps=100), Setting(fast, "ddp", "fp32", 4, accumulate=2))
    assert longer.training_seconds == pytest.approx(100 * found.step_seconds)
    again = estimate(written_facts(), Setting(fast, "ddp", "fp32", 4, recompute=True))
    assert again.compute_seconds == pytest.approx(4 * 7.5e9 / 0.5e12)


def test_between_nodes_the_network_counts():
    two = Machines(16, 8, link_bytes_per_second=1e4, network_bytes_per_second=1e3)
    found = estimate(written_facts(), Setting(two, "hybrid", "fp32", 4)).communication
    inside = found.sent_bytes["all_gather"] + found.sent_bytes["reduce_scatter"]
    assert found.seconds == pytest.approx(inside / 1e4 + found.sent_bytes["all_reduce"] / 1e3)
    # A ring over both nodes leaves a node through one of its 8 adapters: an eighth of what a GPU sends.
    for strategy in ("ddp", "fsdp"):
        found = estimate(written_facts(), Setting(two, strategy, "fp32", 4)).communication
        assert found.seconds == pytest.approx(found.total_bytes / 8e3)
    fast = replace(two, network_bytes_per_second=1e4)  # then the links inside of a node are the limit
    found = estimate(written_facts(), Setting(fast, "ddp", "fp32", 4)).communication
    assert found.seconds == pytest.approx(found.total_bytes / 1e4)
    unknown = replace(two, network_bytes_per_second=None)
    assert estimate(written_facts(), Setting(unknown, "ddp", "fp32", 4)).communication.seconds is None


def test_a_partial_batch_that_is_left_out_is_no_step():
    setting = Setting(world(), "ddp", "fp32", 4)  # 1,000 samples, 32 in a step
    assert estimate(written_facts(), setting).steps_per_epoch == 32
    assert estimate(written_facts(drop_last=True), setting).steps_per_epoch == 31


def test_the_learning_rate_is_scaled_for_the_effective_batch():
    facts = written_facts(learning_rate=0.1, lr_scaling="linear", reference_batch=32)
    assert estimate(facts, Setting(world(), "ddp", "fp32", 4, accumulate=2)).learning_rate == pytest.approx(0.2)


def test_a_checkpoint_has_parameters_states_and_averages():
    assert estimate(written_facts(averages=True), Setting(world(), "ddp", "fp32", 4)).checkpoint_bytes == 4 * ALL


def test_without_a_trace_states_are_exact_and_activations_unknown():
    found = estimate(written_facts(passes={}, flops_per_sample=None), Setting(world(), "ddp", "fp32", 4))
    assert found.memory.activations_bytes is None
    assert found.memory.states_bytes == 4 * ALL
    assert found.fits() is None
    small = Setting(world(memory=1000), "ddp", "fp32", 4)
    assert estimate(written_facts(passes={}), small).fits() is False  # the states alone are too much


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("single", 8, {}), "8 GPUs would train 8 models"),
        (("fsdp", 1, {}), "nothing to shard"),
        (("hybrid", 8, {}), "only one group"),
        (("ddp", 8, {"offload": True}), "only sharded training can offload"),
        (("hybrid", 8, {"shard_ranks": 3}), "cannot be divided into groups of 3"),
    ],
)
def test_strategies_that_cannot_apply(arguments, words):
    strategy, gpus, options = arguments
    with pytest.raises(UsageError, match=words):
        Setting(world(gpus), strategy, "fp32", 4, **options)


def test_optimizers_and_models_that_a_setting_does_not_suit():
    muon = written_facts(optimizer=OptimizerFacts("Muon", 0.0, 0.0, needs_whole_matrices=True))
    with pytest.raises(UsageError, match="Muon cannot train sharded"):
        memory("fsdp", facts=muon)
    with pytest.raises(UsageError, match="no repeated blocks"):
        memory("ddp", facts=written_facts(blocks=0, parameters=[adam_parameter("all", (4, 4))]), recompute=True)


def test_virtual_ranks_keep_a_gradient_for_each_open_subtree():
    def gradients(gpus, virtual_ranks):
        found = memory("ddp" if gpus > 1 else "single", gpus=gpus, virtual_ranks=virtual_ranks)
        return found.at_peak["gradients"] // ALL, found.at_peak["communication"] / ALL

    assert [gradients(1, count)[0] for count in (2, 4, 8, 16)] == [2, 3, 4, 5]  # log2 + 1
    assert gradients(2, 8) == (3, 2.0)  # four virtual ranks each, which are one subtree in the end
    assert gradients(3, 8)[1] > 2.0  # no even division: some ranks exchange several subtrees
    eight = memory("ddp", gpus=8, virtual_ranks=8)
    assert (eight.communication_bytes, eight.peak_bytes) == (2 * ALL, memory("ddp", gpus=8).peak_bytes + ALL)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_virtual_ranks_send_the_bytes_of_an_all_reduce_on_a_power_of_two_of_gpus(gpus):
    facts = replace(written_facts(), buffers_bytes=0)

    def sent(gpus, **options):
        return estimate(facts, Setting(world(gpus), "ddp", "fp32", 4, **options)).communication.total_bytes

    assert sent(gpus, virtual_ranks=8) == sent(gpus)
    assert sent(3) < sent(3, virtual_ranks=8) <= 2 * sent(3)


def test_fsdp_with_virtual_ranks_keeps_whole_gradients_and_sends_the_bytes_of_a_reduce_scatter():
    facts = replace(written_facts(), buffers_bytes=0)

    def of(gpus, **options):
        return estimate(facts, Setting(world(gpus), "fsdp", "fp32", 4, **options))

    assert of(8, virtual_ranks=8).memory == of(8).memory
    assert of(2, virtual_ranks=8).communication.total_bytes == of(2).communication.total_bytes
    kept = [of(2, virtual_ranks=8, accumulate=4).memory.gradients_bytes, of(2, accumulate=4).memory.gradients_bytes]
    assert kept[0] == kept[1]  # what stays for the update
    peaks = of(2, virtual_ranks=8, accumulate=4).memory.peak_bytes, of(2, accumulate=4).memory.peak_bytes
    assert peaks[0] == pytest.approx(peaks[1] + 2 * ALL, rel=0.01)  # three whole gradients, and not one


def test_virtual_ranks_need_enough_of_them_and_one_copy_in_all_shards():
    with pytest.raises(UsageError, match="8 GPUs cannot share 4 virtual ranks"):
        memory("ddp", virtual_ranks=4)
    with pytest.raises(UsageError, match="do not work with hybrid shards"):
        memory("fsdp", virtual_ranks=8, offload=True)


def test_micro_batches_are_those_of_a_virtual_rank():
    facts = replace(written_facts(), global_batch=64)
    setting = at_micro_batch(facts, Setting(world(2), "ddp", "fp32", 1, virtual_ranks=8), 4)
    assert (setting.micro_batch, setting.accumulate) == (4, 8)  # four virtual ranks with two micro-batches each
