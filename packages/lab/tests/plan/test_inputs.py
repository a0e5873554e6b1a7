"""Sizes, bandwidths and names of GPUs on the command line."""

import pytest

from lockstep.core.errors import UsageError
from lockstep_lab.plan import inputs


def test_sizes_and_bandwidths():
    assert inputs.size("80GB", "") == 80e9
    assert inputs.size("79.5 GiB", "") == int(79.5 * 2**30)
    assert inputs.bandwidth("50GB/s", "") == 50e9
    assert inputs.bandwidth("400Gbit/s", "") == inputs.bandwidth("400Gb/s", "") == 50e9
    for text in ("80 apples", "", "0GB", "-3GB", "iB"):
        with pytest.raises(UsageError, match="is not a size"):
            inputs.size(text, "--gpu-memory")
    with pytest.raises(UsageError, match="80 bytes"):
        inputs.size("80", "--gpu-memory")
    for text in ("fast", "50", "0GB/s"):
        with pytest.raises(UsageError, match="is not a bandwidth"):
            inputs.bandwidth(text, "plan.link_bandwidth")


def test_a_known_gpu_brings_memory_throughput_and_its_link():
    world = inputs.world(16, gpu_name="NVIDIA A100-SXM4-80GB", network_bandwidth="200Gbit/s")
    assert (world.memory_bytes, world.gpus_per_node, world.nodes) == (80_000_000_000, 8, 2)
    assert world.peak_flops == {"fp32": 19.5e12, "bf16": 312e12, "fp16": 312e12}
    assert world.bandwidth(8) == 300e9  # one direction
    assert world.bandwidth(16) == 25e9
    assert inputs.world(1, gpu_name="H100", fp32_as_tf32=True).peak_flops["fp32"] == 494.7e12
    assert "bf16" not in inputs.world(1, gpu_name="T4").peak_flops


def test_options_take_precedence_over_the_table():
    world = inputs.world(2, gpu_name="H100", gpu_memory="40GB", link_bandwidth="10GB/s")
    assert (world.memory_bytes, world.link_bytes_per_second) == (40e9, 10e9)


def test_bad_worlds():
    with pytest.raises(UsageError, match="memory of a GPU is not given"):
        inputs.world(8)
    with pytest.raises(UsageError, match="nearest is 'H100'"):
        inputs.world(8, gpu_name="H1000")
    with pytest.raises(UsageError, match="do not fill nodes"):
        inputs.world(12, gpus_per_node=8, gpu_memory="80GB")
    with pytest.raises(UsageError, match="is not a fraction"):
        inputs.world(8, gpu_memory="80GB", utilisation=40)
