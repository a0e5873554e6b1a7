"""CPU seconds that the index of an FSDP checkpoint takes, by the number of ranks. No rank is started: it is computed.

    python benchmarks/checkpoint_index.py [--ranks 8 128 512] [--tensors 900]

Rank 0 makes the index of the parts that all ranks have written, and writes it twice: as `index.json`, and as the
`.metadata` of torch.distributed.checkpoint. It does so in its background thread. A rank that reads the checkpoint reads
the whole index, and finds its own parts in it. 900 tensors are about those of a model of 300 parameters with Adam.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from lockstep.core.checkpoint import files
from lockstep.core.checkpoint.shared_parts import SharedParts

ROWS, LENGTH = 4096, 132_345


class Node:
    """Eight ranks of a node that all want the same parts."""

    def gather(self, value):
        return [value] * 8


def share_of(rank, ranks, tensors):
    """The index of what a rank has written: a part of each tensor."""
    part = {"start": rank * ROWS // ranks, "rows": ROWS // ranks, "file": files.share_name(rank), "length": LENGTH}
    return {
        f"optimizer.layers.{number}.weight.exp_avg": {
            "shape": [ROWS, ROWS],
            "dtype": "float32",
            "parts": [{**part, "offset": number * LENGTH}],
        }
        for number in range(tensors)
    }


def timed(call):
    begun = time.process_time()
    value = call()
    return value, time.process_time() - begun


def measure(ranks, tensors):
    shares = [share_of(rank, ranks, tensors) for rank in range(ranks)]
    index, merge_s = timed(lambda: files.merge(shares))
    text, text_s = timed(lambda: json.dumps({"tensors": index, "values": {}}))
    with tempfile.TemporaryDirectory() as folder:
        _, metadata_s = timed(lambda: files.write_dcp_metadata(Path(folder), index))
    rows = ranks // 2 * ROWS // ranks

    def find():
        back = json.loads(text)["tensors"]
        SharedParts(
            None, back, {name: files._parts(of, (rows, rows + ROWS // ranks)) for name, of in back.items()}, Node()
        )

    _, read_s = timed(find)
    print(
        f"| {ranks} | {len(text) / 1e6:.1f} | {merge_s + text_s:.2f} | {metadata_s:.2f} | {read_s:.2f} |",
        flush=True,
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128, 512])
    parser.add_argument("--tensors", type=int, default=900)
    options = parser.parse_args()
    print("| ranks | index.json, MB | rank 0: merge, JSON, s | rank 0: .metadata, s | each rank: read, find, s |")
    print("|---:|---:|---:|---:|---:|")
    for ranks in options.ranks:
        measure(ranks, options.tensors)


if __name__ == "__main__":
    main()
